"""What all parties know where their pushes are done: `SyncPoint`, a plain value."""

from typing import NamedTuple

from torch import Tensor

from allstep.kvstore.training.push import Push


class SyncPoint(NamedTuple):
    """What all parties know at a synchronization point.

    version: pushes so far. position: samples claimed so far, all of them done. parties: the living
    ranks. lost: those lost since the last point, and why. pushes: those since the last point, in
    their order. values: what each living party passed to `synchronize`, by rank.
    """

    version: int
    position: int
    parties: tuple[int, ...]
    lost: dict[int, str]
    pushes: list[Push]
    values: dict[int, Tensor]
