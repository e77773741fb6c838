"""How long does an elastic run on two hosts pause when it loses a worker or a host?

    python benchmarks/elastic_hosts.py [--repetitions 9] [--lost-seconds 10] [--json FILE]

The hosts are those of the tests (tests/support/hosts.py): network namespaces on a switch, each with
its own sshd, which needs root. Each has two workers that train a small CNN with `hvd.elastic`, as
in `allstep bench recover`. In turns,

- one worker is killed with SIGKILL, another rank in each repetition; three workers continue;
- the link of the second host is cut: packets are lost and no connection ends. The launcher and two
  workers on the first host continue.

The time counts from the kill or the cut to the first step that all survivors have finished, on the
slowest of them. Targets: 1 s; ALLSTEP_LOST_SECONDS (`--lost-seconds`) + 2 s.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from allstep.bench.recover.live_run import LiveRun, by_rank, have_stepped, running
from allstep.bench.recover.measure import recovered
from allstep.bench.recover.result import RecoverRow, Recovery
from allstep.bench.result import document
from allstep.bench.script import parsed, positive
from allstep.console.rich_table import figure_columns
from allstep.process.python import run_module

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.hosts import SshHosts, why_not

KILLED, CUT = "one worker killed", "link of a host cut"
STEPS_BEFORE = 10
SECONDS_TO_START = 120.0
SECONDS_TO_RECOVER = 60.0


def measure(hosts: SshHosts, repetitions: int, lost_seconds: int) -> dict[str, list[Recovery]]:
    """Return the recoveries of both cases."""
    found: dict[str, list[Recovery]] = {KILLED: [], CUT: []}
    for number in range(repetitions):
        found[KILLED].append(recover(hosts, lost_seconds, partial(kill, number % 4)))
        found[CUT].append(recover(hosts, lost_seconds, partial(cut, hosts)))
        print(f"{number + 1} of {repetitions}", file=sys.stderr)
    return found


def recover(hosts: SshHosts, lost_seconds: int, harm: Callable[[list[int]], set[int]]) -> Recovery:
    """Start a run, do `harm` to it, and return how the others recovered.

    `harm` is called with the pids of the workers by rank, and returns those that it takes away.
    """
    run = ["run", "-H", "h1:2,h2:2", "-np", "4", "--min-np", "2", "--ssh", hosts.ssh]
    worker = run_module("allstep.bench.recover.elastic_worker", "train", "FOLDER")
    command = [*hosts.prefix(0), *run_module("allstep", *run, *worker)]
    env = {"ALLSTEP_LOST_SECONDS": str(lost_seconds)}
    try:
        with running("two hosts", command, env) as live:
            return _harmed(live, harm, lost_seconds)
    finally:
        hosts.mend(1)


def _harmed(live: LiveRun, harm: Callable[[list[int]], set[int]], lost_seconds: int) -> Recovery:
    workers = live.wait_until(have_stepped(4, STEPS_BEFORE), SECONDS_TO_START, "trained no steps")
    began = time.monotonic()
    lost = harm(by_rank(workers))
    condition = recovered(began, lost, 4 - len(lost))
    after = live.wait_until(condition, SECONDS_TO_RECOVER + lost_seconds, "did not recover")
    return Recovery.of(began, after)


def kill(rank: int, pids: list[int]) -> set[int]:
    """Kill one worker."""
    os.kill(pids[rank], signal.SIGKILL)
    return {pids[rank]}


def cut(hosts: SshHosts, pids: list[int]) -> set[int]:
    """Cut the link of the second host, which has the last two ranks."""
    hosts.cut(1)
    return set(pids[2:])


def table(rows: list[RecoverRow], targets: dict[str, float]) -> Table:
    """Return the seconds without a finished step."""
    shown = figure_columns(
        [""], ["median", "min", "max", "noticed", "formed", "step", "target (quiet)"]
    )
    for row in rows:
        seconds = [median(row.gaps), min(row.gaps), max(row.gaps), *row.parts.values()]
        cells = [f"{each:.3f}" for each in seconds]
        shown.add_row(row.name, *cells, f"{targets[row.name]:.1f}")
    return shown


def as_json(row: RecoverRow, target: float) -> dict[str, object]:
    """Return all figures of a row."""
    figures = {"gaps": row.gaps, "median": median(row.gaps), "parts": row.parts}
    return {"name": row.name, **figures, "target": target}


def main(options: argparse.Namespace) -> None:
    """Make the hosts, measure, and print."""
    hosts = SshHosts(["h1", "h2"])
    try:
        found = measure(hosts, options.repetitions, options.lost_seconds)
    finally:
        hosts.close()
    rows = [RecoverRow(name, recoveries) for name, recoveries in found.items()]
    targets = {KILLED: 1.0, CUT: options.lost_seconds + 2.0}
    Console(highlight=False).print(table(rows, targets))
    if options.json:
        lines = [as_json(row, targets[row.name]) for row in rows]
        options.json.write_text(document("elastic_hosts", lines, []) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=positive, default=9)
    parser.add_argument("--lost-seconds", type=positive, default=10)
    chosen = parsed(parser)
    if reason := why_not("ssh", "sshd", "ssh-keygen"):
        parser.error(f"no hosts can be made here: {reason}")
    main(chosen)
