"""Is a predicted step the measured one, on 2 to 8 workers of up to 8 hosts?

Hosts are network namespaces with shaped links (`shaped_hosts`), layers sleep (`sleeping`), all else
is real. Starting a rank costs an import of torch, so the bench starts one world for each number of
workers per host and runs in it all configurations that fit: a smaller one is a group of its first
ranks, on links that are shaped for it.

In each configuration the ranks train some steps that do not count, then `steps` that do. A step
takes the mean over its ranks, the configuration the median over its steps. The CPU time of the
ranks is measured, too: above `result.MOST_CPU` of all cores the ranks slow each other down, and
there is no verdict.
"""

import contextlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from allstep.bench.comm.measure import Team, start_team
from allstep.bench.plan.configurations import Configuration, chosen, predict
from allstep.bench.plan.result import PlanResult, PlanRow
from allstep.bench.plan.shaped_hosts import ShapedHosts, check_possible
from allstep.machine import allowed_cores
from allstep.process.python import run_module

STEPS = 8
_MESSAGES = 60
_MBIT, _BURST = 100, 512 << 10
"""The link on which a message is timed; its few bytes pass at once."""
_SECONDS_TO_ANSWER = 300.0
_SECONDS_TO_START = 300.0
_PORT = 29500

Progress = Callable[[str], None]


def num_turns(largest: int) -> int:
    """Return how often `measure_plan` calls its progress."""
    found = chosen(largest)
    return len(found) + len({each.per_host for each in found})


def measure_plan(
    largest: int, steps: int = STEPS, progress: Progress = lambda text: None
) -> PlanResult:
    """Measure every configuration of at most `largest` workers, and predict it.

    `progress` is called with the current phase, `num_turns` times. Raise ConfigError where hosts
    cannot be made.
    """
    check_possible()
    rows: dict[Configuration, PlanRow] = {}
    message = 0.0
    worlds = sorted(chosen(largest), key=lambda each: each.per_host)
    for per_host, each in groupby(worlds, key=lambda each: each.per_host):
        configurations = list(each)
        hosts = max(one.hosts for one in configurations)
        progress(f"starting {hosts * per_host} ranks")
        with _world(hosts, per_host) as (network, team):
            # Measured once: the first world is the one with a worker on each host.
            message = message or _message(network, team)
            for one in configurations:
                progress(one.name)
                rows[one] = _measure(network, team, one, steps, message)
    return PlanResult(tuple(rows[one] for one in chosen(largest)), message, steps, allowed_cores())


@contextlib.contextmanager
def _world(hosts: int, per_host: int) -> Iterator[tuple[ShapedHosts, Team]]:
    """Make hosts and start their ranks; both end with the context."""
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="allstep-bench-")))
        network = ending.enter_context(ShapedHosts(hosts))
        command = _command(network, hosts, per_host)
        size = hosts * per_host
        limits = (_SECONDS_TO_ANSWER, _SECONDS_TO_START)
        yield network, start_team(f"{size} ranks", command, size, folder, ending, *limits)


def _command(network: ShapedHosts, hosts: int, per_host: int) -> list[str]:
    """Return a command that starts all ranks, each on its host, and waits for them."""
    lines = []
    for rank in range(hosts * per_host):
        host = rank // per_host
        # torchrun's variables; GROUP_RANK identifies the host.
        place = {
            "RANK": rank,
            "WORLD_SIZE": hosts * per_host,
            "LOCAL_RANK": rank % per_host,
            "LOCAL_WORLD_SIZE": per_host,
            "GROUP_RANK": host,
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        env = ["env", *(f"{name}={value}" for name, value in place.items())]
        rank_command = run_module("allstep.bench.plan.rank", executable=sys.executable)
        lines.append(f'{shlex.join([*network.prefix(host), *env, *rank_command])} "$1" &')
    # The path of the socket becomes $1.
    return ["sh", "-c", "\n".join([*lines, "wait"]), "ranks"]


def _message(network: ShapedHosts, team: Team) -> float:
    """Return the seconds of a small message: half of the median time there and back.

    The time counts from the moment when both ranks are there, which is the shorter of their two.
    """
    network.shape(_MBIT, _BURST)
    answers = team.request({"message": _MESSAGES})
    pairs = zip(*(each["seconds"] for each in answers if each["seconds"]), strict=True)
    return float(median(min(pair) for pair in pairs)) / 2


def _measure(
    network: ShapedHosts, team: Team, each: Configuration, steps: int, message: float
) -> PlanRow:
    network.shape(each.mbit, each.burst)
    order = {"train": list(range(each.size)), "layers": each.layers, "limit": each.limit}
    answers = team.request({**order, "slow": each.slow, "steps": steps})[: each.size]
    seconds = tuple(map(fmean, zip(*(answer["seconds"] for answer in answers), strict=True)))
    cpu = sum(answer["cpu"] for answer in answers) / (allowed_cores() * sum(seconds))
    predictions: Sequence[float] = [
        predict(each, message, count_burst=count).seconds for count in (True, False)
    ]
    return PlanRow(each, predictions[0], predictions[1], seconds, cpu)
