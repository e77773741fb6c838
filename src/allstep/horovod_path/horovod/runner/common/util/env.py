"""Which rank of how many we are, before `init()`."""

from allstep.world import World


def get_env_rank_and_size() -> tuple[int, int]:
    """From whatever launcher started this process; (0, 1) when none did.

    A rank without a size is a RuntimeError.
    """
    world = World.detect()
    return world.rank, world.size
