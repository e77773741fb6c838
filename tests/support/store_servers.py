"""Workers on imagined hosts and the servers of their stores, all forked from the rank server.

    results = with_servers(ranks, "aab", 2, work)        # workers on hosts a, a and b; 2 servers

Servers are further processes of the same call, so no interpreter is started for them. They end when
all workers have.
"""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from allstep.comm.join.rendezvous import connect_to_launcher
from allstep.kvstore.links.announced import COUNT, SERVER
from allstep.kvstore.serving.process import Server
from allstep.limits import read_limits
from allstep.process.liveness import life_of
from allstep.world import places
from support.ranks import Outcome, Ranks, describe

_PID = "test/pid/"
SERVER_PID = "test/server/"


def with_servers(
    ranks: Ranks,
    hosts: str,
    num_servers: int,
    work: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> list[Any]:
    """Return what each worker returns; fail the test, showing all output, if one fails."""
    outcomes = outcomes_with_servers(ranks, hosts, num_servers, work, *args, **options)
    if any(outcome.exit_code for outcome in outcomes):
        pytest.fail("\n".join(map(describe, outcomes)), pytrace=False)
    return [outcome.result for outcome in outcomes[: len(hosts)]]


def outcomes_with_servers(
    ranks: Ranks,
    hosts: str,
    num_servers: int,
    work: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> list[Outcome]:
    """Return how each worker and each server ended. hosts: a letter for each worker."""
    num_workers = len(hosts)
    worlds = places([f"host-{host}" for host in hosts])
    envs = [{**world.to_env(), COUNT: str(num_servers)} for world in worlds]
    envs += [{SERVER: str(number)} for number in range(num_servers)]
    return ranks.outcomes(
        num_workers + num_servers, _either, num_workers, work, args, envs=envs, **options
    )


def _either(num_workers: int, work: Callable[..., Any], args: Sequence[Any]) -> Any:
    store = connect_to_launcher(read_limits())
    name = os.environ.get(SERVER)
    if name is None:
        store.set(_PID + os.environ["ALLSTEP_RANK"], str(os.getpid()))
        return work(*args)
    store.set(SERVER_PID + name, str(os.getpid()))
    lives = [life_of(int(store.get(f"{_PID}{rank}"))) for rank in range(num_workers)]
    Server(name, store, read_limits(), lambda: not all(life.has_ended() for life in lives)).run()
    os._exit(0)


def kill_server(number: int) -> None:
    """Kill a server with -9, from a worker."""
    _kill(f"{SERVER_PID}{number}")


def kill_worker(rank: int) -> None:
    """Kill another worker with -9, from a worker."""
    _kill(f"{_PID}{rank}")


def _kill(key: str) -> None:
    os.kill(int(connect_to_launcher(read_limits()).get(key)), signal.SIGKILL)
