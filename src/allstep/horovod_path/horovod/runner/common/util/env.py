"""Rank and size of this process before `init()`."""

from allstep.world import World


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size from the launcher's variables; (0, 1) without a launcher.

    Raises RuntimeError for a rank without a size.
    """
    world = World.detect()
    return world.rank, world.size
