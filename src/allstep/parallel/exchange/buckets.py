"""Parameters cut into buckets, whose gradients travel together.

Between hosts gradients travel while the rest is still being computed: parameters are cut into
buckets, last layers first, and each bucket is reduced as soon as its gradients are there. On one
host all cores are busy computing, so there is one bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from allstep.parallel.exchange.pack import Pack
from allstep.parallel.exchange.parameter_order import Named

LARGE = 1 << 20  # bytes from which on a gradient is reduced by itself, where it lies
BUCKET = 25 << 20  # bytes that travel together while the rest is still being computed


@dataclass
class Bucket:
    """Parameters whose gradients are reduced together, by number."""

    numbers: list[int]
    packs: list[Pack] = field(default_factory=list)
    missing: int = 0  # gradients that are not there yet


def cut(named: Sequence[Named], several: bool) -> list[Bucket]:
    """Buckets of about 25 MB, or a single one.

    The last layers, whose gradients are ready first, come first.
    """
    if not several:
        return [Bucket(list(range(len(named))))]
    buckets: list[Bucket] = []
    room = 0
    for number in reversed(range(len(named))):
        nbytes = nbytes_of(named[number].parameter)
        if nbytes > room:
            buckets.append(Bucket([]))
            room = BUCKET
        buckets[-1].numbers.append(number)
        room -= nbytes
    return buckets


def small_ones(named: Sequence[Named], bucket: Bucket) -> list[list[int]]:
    """The small parameters of a bucket, by dtype and device: each list travels in one buffer."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number in bucket.numbers:
        parameter = named[number].parameter
        if not is_large(parameter) and parameter.numel():
            kinds.setdefault((parameter.dtype, parameter.device), []).append(number)
    return list(kinds.values())


def is_large(tensor: Tensor) -> bool:
    """Whether a gradient like it is reduced by itself, where it lies."""
    return nbytes_of(tensor) >= LARGE


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()
