"""Measure allreduce between hosts over a slow link, compared with the link itself and with Gloo.

    python benchmarks/two_hosts.py [--hosts 2] [--ranks-per-host 2] [--mbit 1000]
                                   [--sizes 4KB,1MB,32MB,100MB] [--repetitions 9]

The hosts are those of the tests (tests/support/hosts.py): network namespaces on a switch, each with
its own sshd, which needs root. Each host's link is limited to the given rate in both directions by
a token bucket; its queue is long enough that no packet is dropped.

```
 h1 == 1 Gbit/s == switch == 1 Gbit/s == h2        ranks of a host share memory
```

| contender | what is timed |
|---|---|
| allstep, shared | `dist.all_reduce` of a tensor made by `allstep.comm.shared_empty` |
| allstep, private | the same call with an ordinary tensor |
| Gloo | the same tensor and call on a flat group of all ranks: `new_group(backend="gloo")` |
| allstep, ring ... | the private tensor, with this algorithm for the step between the hosts |
| plain TCP | the minimum: each of h hosts sends 2 (h-1)/h of the tensor to the next one |

All contenders get one turn before any of them gets the next, in the same processes (plain TCP in
its own, one per host), as in `allstep bench comm`, which documents how a turn is timed and how
every sum is checked. "x TCP" is the time divided by that of plain TCP, near 1 if the link is fully
used; "x Gloo" is speed. "sent" is what the interface of the busiest host counted per call,
including headers and acknowledgements. Hosts here share the machine's cores: with few of them,
large sums wait for cores, not only for the link.

A missed target is a finding, not an error; a wrong sum is an error. At the end no host, process or
file is left.
"""

import argparse
import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from allstep.bench.comm.measure import CommFailed, Team, Turns, start_team, too_large
from allstep.bench.comm.rank import serve
from allstep.bench.comm.result import (
    GLOO,
    KB,
    MB,
    PRIVATE,
    SHARED,
    CommRow,
    parse_sizes,
    show_size,
    show_time,
)
from allstep.bench.result import Missing, absences, document
from allstep.errors import AllstepError, UserError
from allstep.world import World

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.hosts import SshHosts, why_not

TCP = "plain TCP"
# Of plain TCP; each host has its own ports.
PORT = 5001
SECONDS_TO_CONNECT = 30.0
# The targets: maximum time compared with plain TCP, minimum speed compared with Gloo.
MAX_TCP, MIN_GLOO = 1.15, 1.35


# The hosts


class LimitedHosts(SshHosts):
    """Hosts whose links carry `mbit` Mbit/s in each direction."""

    def __init__(self, num_hosts: int, mbit: int) -> None:
        super().__init__([f"h{k + 1}" for k in range(num_hosts)])
        # A bucket of 4 ms keeps the rate even if the kernel handles it only 250 times a second.
        # With 400 ms of queue no packet is dropped.
        burst = str(max(512 << 10, mbit * 500))
        bucket = ["rate", f"{mbit}mbit", "burst", burst, "latency", "400ms"]
        try:
            for where, device in self._ends():
                _output(*where, "tc", "qdisc", "add", "dev", device, "root", "tbf", *bucket)
        except BaseException:
            self.close()
            raise

    def _ends(self) -> Iterator[tuple[list[str], str]]:
        """Yield both ends of every link: a command prefix, and the name of the device.

        A bucket limits packets that leave at its end.
        """
        for k in range(len(self.names)):
            yield self.prefix(k), "eth0"
            yield self._on_switch(), f"port{k}"

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each host has sent since it was made."""
        file = "/sys/class/net/eth0/statistics/tx_bytes"
        return [int(_output(*self.prefix(k), "cat", file)) for k in range(len(self.names))]

    def dropped(self) -> int:
        """Return the packets that the links have dropped; TCP loses time by sending them again."""
        found = (
            _output(*where, "tc", "-s", "-j", "qdisc", "show", "dev", device)
            for where, device in self._ends()
        )
        return sum(bucket["drops"] for text in found for bucket in json.loads(text))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


# Plain TCP


class PlainTcp:
    """One process per host, which sends to the next host while it receives from the last one.

    It answers the requests of `comm.rank`.
    """

    def __init__(self, world: World, addresses: Sequence[str]) -> None:
        self.rank, self.size, self.names = world.rank, world.size, [TCP]
        with socket.create_server((addresses[self.rank], PORT)) as door:
            door.settimeout(SECONDS_TO_CONNECT)
            self._to = _connect(addresses[(self.rank + 1) % self.size])
            self._from, _ = door.accept()
        self._to.setblocking(False)
        self._from.setblocking(False)
        self._data = memoryview(b"")
        self._landing = memoryview(bytearray(MB))

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute a request of the bench and return the answer."""
        if "prepare" in order:
            self._data = memoryview(bytes(share_of(self.size, order["prepare"])))
            return {"absent": {}}
        for _ in range(self.size):
            # A byte that has passed all hosts shows that all of them are ready.
            self._exchange(memoryview(b"x"))
        return {"seconds": [self._time() for _ in range(order["calls"])]}

    def _time(self) -> float:
        started = time.perf_counter()
        self._exchange(self._data)
        return time.perf_counter() - started

    def _exchange(self, leaving: memoryview) -> None:
        """Send all of `leaving`, and receive the same number of bytes."""
        coming = len(leaving)
        while leaving or coming:
            readable, writable, _ = select.select(
                [self._from] if coming else [], [self._to] if leaving else [], []
            )
            if writable:
                leaving = leaving[self._to.send(leaving) :]
            if readable:
                came = self._from.recv_into(self._landing[:coming])
                if not came:
                    raise ConnectionError(
                        f"the host before {self.rank} closed its link {coming} bytes before the end"
                    )
                coming -= came


def _connect(address: str) -> socket.socket:
    """Connect to a neighbor that may not listen yet."""
    end = time.monotonic() + SECONDS_TO_CONNECT
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=SECONDS_TO_CONNECT)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def share_of(num_hosts: int, nbytes: int) -> int:
    """Return the bytes that a host must send when `num_hosts` of them sum a tensor.

    It sends all but its own part twice: once to be added, and once as sums.
    """
    return 2 * (num_hosts - 1) * nbytes // num_hosts


# Measuring


class CountedTurns(Turns):
    """Turns that also count the bytes that the busiest host sends per call."""

    def __init__(self, hosts: LimitedHosts, *what: Any) -> None:
        self._hosts = hosts
        self.sent: dict[str, list[float]] = {}
        super().__init__(*what)

    def measure(self, name: str, calls: int) -> list[list[float]]:
        before = self._hosts.sent_bytes()
        seconds = super().measure(name, calls)
        after = self._hosts.sent_bytes()
        busiest = max(now - then for now, then in zip(after, before, strict=True))
        self.sent.setdefault(name, []).append(busiest / calls)
        return seconds


@dataclass(frozen=True)
class Found:
    """One row; `sent` is the bytes per call of the busiest host."""

    row: CommRow
    sent: float


def measure(options: argparse.Namespace, missing: dict[str, str]) -> list[Found]:
    """Make the hosts, start all contenders, and measure every size.

    No host, process or file is left afterwards.
    """
    num_ranks = options.hosts * options.ranks_per_host
    found: list[Found] = []
    with contextlib.ExitStack() as ending:
        hosts = LimitedHosts(options.hosts, options.mbit)
        ending.callback(hosts.close)
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="allstep-bench-")))
        wire = _start(
            hosts, TCP, 1, [__file__, "--plain-tcp", ",".join(hosts.addresses)], folder, ending
        )
        _check_rate(wire, options)
        ranks = _start(
            hosts,
            "ranks",
            options.ranks_per_host,
            ["-m", "allstep.bench.comm.rank", "torch"],
            folder,
            ending,
        )
        for nbytes in options.sizes:
            place = f"{num_ranks} ranks, {show_size(nbytes)}"
            print(f"{place} ...", file=sys.stderr)
            if reason := too_large(num_ranks, nbytes):
                missing[place] = reason
                continue
            turns = CountedTurns(hosts, [ranks, wire], nbytes, place, missing)
            turns.warm_up()
            # The first call also measures the link, which sends more bytes.
            turns.sent.clear()
            for _ in range(options.repetitions):
                turns.take()
            found += [Found(row, median(turns.sent[row.row.name])) for row in turns.rows(num_ranks)]
        print(f"packets dropped on the links: {hosts.dropped()}")
    return found


def _start(
    hosts: LimitedHosts,
    name: str,
    per_host: int,
    program: list[str],
    folder: Path,
    ending: contextlib.ExitStack,
) -> Team:
    where = ",".join(f"{host}:{per_host}" for host in hosts.names)
    run = [
        sys.executable,
        "-m",
        "allstep",
        "run",
        "-H",
        where,
        "--ssh",
        hosts.ssh,
        sys.executable,
        *program,
    ]
    return start_team(name, run, per_host * len(hosts.names), folder, ending)


def _check_rate(wire: Team, options: argparse.Namespace) -> None:
    """Measure half a second of plain TCP, on all hosts at once and in both directions."""
    nbytes = int(options.mbit * 1e6 / 8 / 2)
    wire.request({"prepare": nbytes})
    answers = wire.request({"measure": TCP, "calls": 3})
    seconds = max(median(answer["seconds"]) for answer in answers)
    rate = share_of(options.hosts, nbytes) * 8 / seconds / 1e6
    print(
        f"link of each host: {options.mbit} Mbit/s each way requested, {rate:.0f} Mbit/s measured"
        " with plain TCP"
    )
    if rate > 1.1 * options.mbit:
        raise CommFailed(
            "the links carry more than they should: the limit of tc does not hold here"
        )
    if rate < 0.8 * options.mbit:
        print(
            "the links carry much less than they should: the machine is busy, or too slow for this"
            " rate"
        )


# Output


class Findings:
    """The rows, and their comparison."""

    def __init__(
        self, options: argparse.Namespace, rows: Sequence[Found], missing: dict[str, str]
    ) -> None:
        self.options, self.rows = options, rows
        self.missing = [Missing(name, reason) for name, reason in missing.items()]
        self._medians = {
            (found.row.nbytes, found.row.row.name): found.row.row.median for found in rows
        }

    def times_tcp(self, row: CommRow) -> float:
        """Return the time of the row divided by that of plain TCP."""
        return row.row.median / self._medians[row.nbytes, TCP]

    def times_gloo(self, row: CommRow) -> float:
        """Return the speed of the row divided by Gloo's."""
        return self._medians[row.nbytes, GLOO] / row.row.median

    def met(self, row: CommRow) -> bool | None:
        """Return whether the row meets the target, or None if it has none."""
        place = (self.options.hosts, self.options.ranks_per_host, self.options.mbit, row.nbytes)
        if place != (2, 2, 1000, 32 * MB) or row.row.name not in (SHARED, PRIVATE):
            return None
        return self.times_tcp(row) <= MAX_TCP and self.times_gloo(row) >= MIN_GLOO

    def table(self) -> Table:
        table = Table(
            Column("", no_wrap=True), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
        )
        for head in ("median", "min", "max", "x TCP", "x Gloo", "sent"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("target", no_wrap=True)
        for nbytes, rows in groupby(self.rows, lambda found: found.row.nbytes):
            table.add_row(show_size(nbytes))
            for found in rows:
                table.add_row(*self._cells(found))
            table.add_section()
        return table

    def _cells(self, found: Found) -> list[str]:
        row = found.row.row
        seconds = [show_time(value) for value in (row.median, min(row.seconds), max(row.seconds))]
        ratios = [
            f"{ratio:.{3 if ratio < 10 else 1}f}"
            for ratio in (self.times_tcp(found.row), self.times_gloo(found.row))
        ]
        sent = f"{found.sent / MB:.1f} MB" if found.sent >= MB else f"{found.sent / KB:.1f} KB"
        return [
            row.name,
            *seconds,
            *ratios,
            sent,
            {True: "met", False: "not met", None: "-"}[self.met(found.row)],
        ]

    def to_json(self) -> str:
        return document("two_hosts", [self._as_json(found) for found in self.rows], self.missing)

    def _as_json(self, found: Found) -> dict[str, Any]:
        row = found.row
        return {
            "hosts": self.options.hosts,
            "ranks_per_host": self.options.ranks_per_host,
            "mbit": self.options.mbit,
            "bytes": row.nbytes,
            "name": row.row.name,
            "seconds": list(row.row.seconds),
            "median": row.row.median,
            "min": min(row.row.seconds),
            "max": max(row.row.seconds),
            "mean": row.mean,
            "sent": found.sent,
            "must_send": share_of(self.options.hosts, row.nbytes),
            "times_tcp": self.times_tcp(row),
            "times_gloo": self.times_gloo(row),
            "met": self.met(row),
        }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="allreduce between hosts, compared with the link and Gloo. Needs root."
    )
    parser.add_argument("--hosts", type=_at_least(2), default=2, help="hosts (default: 2)")
    parser.add_argument("--ranks-per-host", type=_at_least(1), default=2, help="(default: 2)")
    parser.add_argument(
        "--mbit", type=_at_least(1), default=1000, help="Mbit/s per direction (default: 1000)"
    )
    parser.add_argument(
        "--sizes",
        type=parse_sizes,
        default="4KB,1MB,32MB,100MB",
        help="(default: 4KB,1MB,32MB,100MB)",
    )
    parser.add_argument(
        "--repetitions",
        type=_at_least(1),
        default=9,
        help="turns after the warm-up (default: 9)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args(arguments)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    return options


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return number


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if reason := why_not("ssh", "sshd", "ssh-keygen", "tc"):
        print(f"error: no hosts can be made here: {reason}", file=sys.stderr)
        return 2
    missing: dict[str, str] = {}
    findings = Findings(options, measure(options, missing), missing)
    console = Console(highlight=False)
    console.print(findings.table())
    for line in absences(findings.missing):
        console.print(line, soft_wrap=True, markup=False)
    print(
        f"target: 32 MB on 2 hosts with 2 ranks at 1000 Mbit/s, at most {MAX_TCP}x TCP and at"
        f" least {MIN_GLOO}x Gloo"
    )
    if options.json:
        options.json.write_text(f"{findings.to_json()}\n")
    return 0


def command(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    SIGTERM is handled like Ctrl-C, so that nothing is left behind.
    """
    if arguments[:1] == ["--plain-tcp"]:
        addresses, path = arguments[1:]
        serve(path, PlainTcp(World.detect(), addresses.split(",")))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return main(arguments)
    except KeyboardInterrupt:
        return 130
    except (AllstepError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
