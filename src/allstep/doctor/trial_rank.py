"""What each rank of the trial does: join the others, sum the ranks with them, and say how it went."""

import json
import time

from allstep.errors import AllstepError
from allstep.world import World

MARK = "allstep-doctor-trial "


def take_part(launcher: str | None = None) -> tuple[World, dict[str, float]]:
    """Join, sum, leave: our place, and the seconds of each."""
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
    world, seconds = take_part()
    if world.rank == 0:
        print(MARK + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
