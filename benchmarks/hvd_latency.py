"""Measure a synchronous `hvd.allreduce` of a small tensor, compared with Gloo's all_reduce.

    python benchmarks/hvd_latency.py [--size 4096] [--turns 15] [--calls 200]

Two ranks on this host run, alternately and in the same processes, `hvd.allreduce` (named,
negotiated), `dist.all_reduce` on backend "allstep" and on backend "gloo". The result of a turn is
the median call of its slowest rank. Target: a third of Gloo's median.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

NAMES = ("hvd.allreduce", "dist.all_reduce, allstep", "dist.all_reduce, gloo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size", type=int, default=4096, help="bytes of the tensor (default: 4096)"
    )
    parser.add_argument("--turns", type=int, default=15, help="turns (default: 15)")
    parser.add_argument("--calls", type=int, default=200, help="calls of a turn (default: 200)")
    given = parser.parse_args()
    if "ALLSTEP_RANK" in os.environ:
        measure(given.size, given.turns, given.calls)
        return
    command = [
        sys.executable,
        "-m",
        "allstep",
        "run",
        "-np",
        "2",
        "--show",
        "0",
        sys.executable,
        __file__,
        *sys.argv[1:],
    ]
    sys.exit(
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
    )


def measure(size: int, turns: int, calls: int) -> None:
    import torch
    import torch.distributed as dist

    import allstep
    import allstep.torch as hvd

    allstep.init()
    hvd.init()
    torch.set_num_threads(1)
    tensor = torch.ones(size // 4)
    gloo = dist.new_group(backend="gloo")
    contenders: dict[str, Callable[[], object]] = {
        NAMES[0]: lambda: hvd.allreduce(tensor, name="loss", op=hvd.Sum),
        NAMES[1]: lambda: dist.all_reduce(tensor.clone()),
        NAMES[2]: lambda: dist.all_reduce(tensor.clone(), group=gloo),
    }
    medians: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(turns + 1):
        for name, call in contenders.items():
            dist.barrier()
            own = statistics.median(timed(call) for _ in range(calls))
            slowest = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:
                medians[name].append(slowest.item())
    if dist.get_rank() == 0:
        reference = statistics.median(medians[NAMES[2]])
        print(f"{size} bytes, 2 ranks, {turns} turns of {calls} calls; microseconds")
        for name, seconds in medians.items():
            median = statistics.median(seconds)
            spread = f"{min(seconds) * 1e6:.1f} to {max(seconds) * 1e6:.1f}"
            print(
                f"{name:26} median {median * 1e6:7.1f}   {spread:18}   {median / reference:.3f} of"
                " Gloo"
            )
    hvd.shutdown()
    allstep.shutdown()


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
