"""One rank of the trial run: join the world, allreduce a tensor, report the times."""

import json
import time

from allstep.errors import AllstepError
from allstep.world import World

MARK = "allstep-doctor-trial "


def run_rank(launcher: str | None = None) -> tuple[World, dict[str, float]]:
    """Join the world, sum a tensor over the ranks and leave.

    Return the world and the seconds of import, init and allreduce. Raise AllstepError if the sum is
    wrong.
    """
    began = time.monotonic()
    import torch
    import torch.distributed as dist

    from allstep import comm

    imported = time.monotonic()
    world = comm.init(launcher)
    joined = time.monotonic()
    total = torch.full((1024,), float(world.rank))
    dist.all_reduce(total)
    seconds = {
        "import": imported - began,
        "init": joined - imported,
        "allreduce": time.monotonic() - joined,
    }
    comm.shutdown()
    expected = world.size * (world.size - 1) / 2
    if not bool((total == expected).all()):
        raise AllstepError(f"the sum over ranks is {total[0].item()}, expected {expected}")
    return world, seconds


def main() -> None:
    """Run this rank; rank 0 prints its times as a marked line of JSON."""
    world, seconds = run_rank()
    if world.rank == 0:
        print(MARK + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
