"""Decisions of all ranks together, so that bad input ends all of them in the same way.

Rank 0 prints one line, and all ranks have the same exit status. Without this, a rank that finds a
file missing would raise while the others wait for it in the next collective.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from allstep.errors import UserError
from allstep.world import World

T = TypeVar("T")


class EndedElsewhere(SystemExit):
    """The exit of a rank for which rank 0 raises the UserError; it has the same exit status.

    A caller that can continue catches both.
    """


def rank_0_decides(world: World, decide: Callable[[], T]) -> T:
    """Return on every rank what `decide` returns on rank 0; end all ranks on its UserError."""
    return one_decides(world, 0, decide)


def one_decides(world: World, rank: int, decide: Callable[[], T]) -> T:
    """Return on every rank what `decide` returns on `rank`; end all ranks on its UserError."""
    answer: list[Any] = [_attempt(world, decide) if world.rank == rank else None]
    # A worker that has not joined its world yet has no group.
    if world.size > 1:
        dist.broadcast_object_list(answer, src=rank)
    value, error = answer[0]
    _end_alike(world, error)
    # The T of rank 0.
    return value  # type: ignore[no-any-return]


def everyone(world: World, act: Callable[[], T]) -> T:
    """Return what `act` returns on this rank; a UserError on any rank ends all ranks."""
    value, error = _attempt(world, act)
    errors = [error for error in gather(world, error) if error is not None]
    _end_alike(world, errors[0] if errors else None)
    # Without an error there is a value.
    return value  # type: ignore[return-value]


def gather(world: World, value: T) -> list[T]:
    """Return the values of all ranks, by rank, on every rank."""
    values: list[Any] = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value)
    return values


def _attempt(world: World, act: Callable[[], T]) -> tuple[T | None, UserError | None]:
    try:
        return act(), None
    except UserError as error:
        place = "" if world.local_size == world.size else f"on {world.host}: "
        return None, type(error)(f"{place}{error}")


def _end_alike(world: World, error: UserError | None) -> None:
    if error is not None:
        raise error if world.rank == 0 else EndedElsewhere(error.exit_code)
