"""What do compressed pushes and pulls gain between hosts, next to the uncompressed allreduce?

    python benchmarks/sync_hosts.py [--mbit 1000,100] [--megabytes 32] [--workers-per-host 2]
                                    [--repetitions 5] [--json FILE]

Two hosts with links of the given speed, each with workers and a server: the network namespaces of
`two_hosts.py`, which needs root. Each contender pushes and pulls one key, or reduces one tensor, of
the given size; what is timed is the slowest worker from a barrier to the result, packing included.
All contenders are in the same processes and take turns. "sent" is what the interface of the first
host counted per call.

| contender | what is timed |
|---|---|
| allreduce | `dist.all_reduce` on the group of allstep |
| servers | `dist_sync`: push and pull |
| servers, bf16 | the same, with bf16 both ways |
| servers, 2bit push | the same, with 2bit for pushes only: MXNet's way |
| servers, 2bit | the same, with 2bit both ways |

"x servers" is the speed compared with uncompressed servers, "x allreduce" with the allreduce. At
the end no host, process or file is left.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from allstep import kvstore

sys.path.insert(0, str(Path(__file__).resolve().parent))
from two_hosts import LimitedHosts, why_not

ALL_REDUCE, PLAIN = "allreduce", "servers"
SETTINGS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "servers, bf16": {"type": "bf16", "pull": "bf16"},
    "servers, 2bit push": {"type": "2bit", "threshold": 0.5},
    "servers, 2bit": {"type": "2bit", "threshold": 0.5, "pull": "2bit"},
}
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def store_call(settings: dict[str, Any], numel: int) -> Callable[[], Any]:
    kv = kvstore.create("dist_sync")
    if settings:
        kv.set_gradient_compression(settings)
    kv.init("w", torch.zeros(numel))
    kv.set_optimizer(torch.optim.SGD, lr=0.1)
    gradient, out = torch.randn(numel), torch.empty(numel)
    return lambda: kv.pushpull("w", gradient, out=out)


def work(megabytes: int, repetitions: int) -> None:
    """Run as a worker; rank 0 prints the seconds and bytes of each call as JSON."""
    dist.init_process_group("allstep")
    numel, found = megabytes << 18, {}
    tensor = torch.randn(numel)
    calls = {ALL_REDUCE: lambda: dist.all_reduce(tensor.fill_(1.0))}
    calls |= {name: store_call(settings, numel) for name, settings in SETTINGS.items()}
    for turn in range(repetitions + 1):
        for name, call in calls.items():
            dist.barrier()
            sent, began = int(SENT.read_text()), time.perf_counter()
            call()
            seconds = torch.tensor([time.perf_counter() - began])
            dist.barrier()
            sent = int(SENT.read_text()) - sent
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn:
                found.setdefault(name, []).append((seconds.item(), sent))
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(found), flush=True)
    dist.barrier()


def measure(mbit: int, options: argparse.Namespace) -> dict[str, list[tuple[float, int]]]:
    """Make the hosts, run the workers, and return seconds and bytes of each call."""
    hosts = LimitedHosts(2, mbit)
    try:
        where = ",".join(f"{host}:{options.workers_per_host}" for host in hosts.names)
        run = [sys.executable, "-m", "allstep", "run", "-H", where, "--ssh", hosts.ssh]
        worker = [sys.executable, __file__, "--work", "--megabytes", str(options.megabytes)]
        done = subprocess.run(
            [*run, *worker, "--repetitions", str(options.repetitions)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=1800,
        )
    finally:
        hosts.close()
    lines = [line.partition("FOUND ")[2] for line in done.stdout.splitlines() if "FOUND " in line]
    if done.returncode or not lines:
        raise SystemExit(f"error: the workers failed with exit status {done.returncode}")
    found: dict[str, list[tuple[float, int]]] = json.loads(lines[0])
    return found


def show(mbit: int, found: dict[str, list[tuple[float, int]]], megabytes: int) -> None:
    times = {name: median(seconds for seconds, _ in calls) for name, calls in found.items()}
    print(f"\n{megabytes} MB, 2 hosts, a server on each, {mbit} Mbit/s, median of the turns")
    head = ("", "ms", "min", "max", "sent MB", "x servers", "x allreduce")
    print(("{:20}" + "{:>12}" * 6).format(*head))
    for name, calls in found.items():
        seconds = [each for each, _ in calls]
        sent = median(each for _, each in calls)
        cells = [1000 * times[name], 1000 * min(seconds), 1000 * max(seconds), sent / 2**20]
        ratios = times[PLAIN] / times[name], times[ALL_REDUCE] / times[name]
        row = [f"{each:.0f}" for each in cells[:3]] + [f"{cells[3]:.1f}"]
        print(("{:20}" + "{:>12}" * 6).format(name, *row, *(f"{each:.2f}" for each in ratios)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compressed servers between hosts. Needs root.")
    parser.add_argument("--mbit", default="1000,100", help="speeds of links (default: 1000,100)")
    parser.add_argument("--megabytes", type=int, default=32, help="of float32 (default: 32)")
    parser.add_argument("--workers-per-host", type=int, default=2, help="(default: 2)")
    parser.add_argument("--repetitions", type=int, default=5, help="turns (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.work:
        work(options.megabytes, options.repetitions)
        return 0
    if reason := why_not("ssh", "sshd", "ssh-keygen", "tc"):
        print(f"error: no hosts can be made here: {reason}", file=sys.stderr)
        return 2
    found = {}
    for mbit in map(int, options.mbit.split(",")):
        found[mbit] = measure(mbit, options)
        show(mbit, found[mbit], options.megabytes)
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
