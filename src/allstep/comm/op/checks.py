"""What the arguments of a collective must be, looked at before any data moves.

Ours say which rank was given what.
"""

from collections.abc import Sequence

from torch import Tensor

from allstep.errors import CollectiveMismatch


def one_for_each_rank(name: str, tensors: Sequence[Tensor], rank: int, size: int) -> None:
    """A list of tensors has one for each rank of the group."""
    if len(tensors) != size:
        raise CollectiveMismatch(
            f"{name} on rank {rank} got {len(tensors)} tensors, but the group has {size} ranks",
            rank=rank,
            op=name,
        )


def fits(name: str, tensor: Tensor, place: Tensor, rank: int) -> None:
    """What goes in has the dtype and size of the place where it comes out."""
    if place.dtype != tensor.dtype or place.numel() != tensor.numel():
        raise CollectiveMismatch(
            f"{name} on rank {rank}: what goes in is {shape(tensor)}, but its place is"
            f" {shape(place)}",
            rank=rank,
            op=name,
        )


def holds_all(name: str, whole: Tensor, share: Tensor, rank: int, size: int) -> None:
    """The large tensor is the shares of all ranks."""
    if whole.dtype != share.dtype or whole.numel() != share.numel() * size:
        raise CollectiveMismatch(
            f"{name} on rank {rank}: {shape(whole)} is not {size} times {shape(share)}",
            rank=rank,
            op=name,
        )


def rows(name: str, tensor: Tensor, splits: Sequence[int], rank: int, size: int) -> None:
    """The first dimension can be split so, or equally when no splits are given."""
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
    """Shape and dtype, for messages."""
    return f"{tuple(tensor.shape)} {tensor.dtype}"
