"""Parameters grouped into buckets, whose gradients are reduced together.

Between hosts gradients are reduced while others are still being computed: parameters are grouped
into buckets, last layers first, and each bucket is reduced as soon as its gradients are available.
On one host all cores are busy computing, so there is one bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from allstep.parallel.exchange.packed_gradients import Pack
from allstep.parallel.exchange.parameter_order import Named

# Bytes from which on a gradient is reduced by itself, in its own memory.
LARGE = 1 << 20
# Bytes that are reduced together while other gradients are still being computed.
BUCKET = 25 << 20


@dataclass
class Bucket:
    """Parameters whose gradients are reduced together.

    `numbers`: of the parameters. `packs`: buffers of small gradients. `missing`: the number of
    gradients that are not available yet.
    """

    numbers: list[int]
    packs: list[Pack] = field(default_factory=list)
    missing: int = 0


def cut(named: Sequence[Named], several: bool, limit: int = BUCKET) -> list[Bucket]:
    """Return buckets of at most `limit` bytes, or a single one. A larger gradient is a bucket.

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
            room = limit
        buckets[-1].numbers.append(number)
        room -= nbytes
    return buckets


def small_parameters(named: Sequence[Named], bucket: Bucket) -> list[list[int]]:
    """Return the small parameters of a bucket by dtype and device; each list shares one buffer."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number in bucket.numbers:
        parameter = named[number].parameter
        if not is_large(parameter) and parameter.numel():
            kinds.setdefault((parameter.dtype, parameter.device), []).append(number)
    return list(kinds.values())


def is_large(tensor: Tensor) -> bool:
    """Return whether a gradient of this size is reduced by itself, in its own memory."""
    return nbytes_of(tensor) >= LARGE


def nbytes_of(tensor: Tensor) -> int:
    """Return the size of a tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()
