"""Checks of the arguments of a collective, made before any data moves.

Each error names the rank and the values that it was given.
"""

from collections.abc import Sequence

from torch import Tensor

from allstep.errors import CollectiveMismatch


def one_for_each_rank(name: str, tensors: Sequence[Tensor], rank: int, size: int) -> None:
    """Check that a list of tensors has one for each rank of the group."""
    if len(tensors) != size:
        raise CollectiveMismatch(
            f"{name} on rank {rank} got {len(tensors)} tensors, but the group has {size} ranks",
            rank=rank,
            op=name,
        )


def fits(name: str, tensor: Tensor, place: Tensor, rank: int) -> None:
    """Check that an input has the dtype and size of its output."""
    if place.dtype != tensor.dtype or place.numel() != tensor.numel():
        raise CollectiveMismatch(
            f"{name} on rank {rank}: the input is {shape(tensor)}, but its output is"
            f" {shape(place)}",
            rank=rank,
            op=name,
        )


def holds_all(name: str, whole: Tensor, share: Tensor, rank: int, size: int) -> None:
    """Check that the large tensor has the size of all ranks' shares together."""
    if whole.dtype != share.dtype or whole.numel() != share.numel() * size:
        raise CollectiveMismatch(
            f"{name} on rank {rank}: {shape(whole)} is not {size} times {shape(share)}",
            rank=rank,
            op=name,
        )


def rows(name: str, tensor: Tensor, splits: Sequence[int], rank: int, size: int) -> None:
    """Check that dimension 0 can be split by `splits`, or equally if there are none."""
    found = tensor.shape[0] if tensor.dim() else -1
    if not splits and found >= 0 and found % size == 0:
        return
    if len(splits) != size or sum(splits) != found:
        raise CollectiveMismatch(
            f"{name} on rank {rank}: {shape(tensor)} cannot be split by rows"
            f" {list(splits) or 'equally'} between {size} ranks",
            rank=rank,
            op=name,
        )


def shape(tensor: Tensor) -> str:
    """Return shape and dtype as text, for messages."""
    return f"{tuple(tensor.shape)} {tensor.dtype}"
