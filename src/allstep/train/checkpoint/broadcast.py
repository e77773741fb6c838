"""Broadcasting a snapshot of one rank to all ranks, tensor by tensor.

Rank 0 has read it from a checkpoint, or in an elastic run a rank has captured its own state for
those that join.

```
names, types, shapes, state    one object, broadcast by torch
each tensor                    one broadcast into memory of the receiver
```

A pickled copy of all tensors would take the memory of the checkpoint twice more on every rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from allstep import faults
from allstep.comm.group import agree
from allstep.train.checkpoint.write_and_read import Snapshot, Tensors
from allstep.world import World

_Layout = tuple[str, torch.dtype, torch.Size]
"""Name, type and shape of a tensor."""


@dataclass(frozen=True)
class _Outline:
    """A snapshot without the values of its tensors."""

    samples: int
    weights: list[_Layout]
    optimizer: list[_Layout]
    state: Mapping[str, Any]


def broadcast_snapshot(world: World, snapshot: Snapshot | None, source: int = 0) -> Snapshot | None:
    """Return the snapshot of the rank `source` on every rank.

    The argument of the other ranks is not used.
    """
    outline = agree.one_decides(
        world, source, lambda: None if snapshot is None else _outline(snapshot)
    )
    if outline is None:
        return None
    if faults.active is not None:
        faults.active.in_phase("broadcast")
    mine = snapshot if world.rank == source else None
    weights = _broadcast(outline.weights, None if mine is None else mine.weights, source)
    optimizer = _broadcast(outline.optimizer, None if mine is None else mine.optimizer, source)
    return Snapshot(outline.samples, dict(weights), dict(optimizer), outline.state)


def _outline(snapshot: Snapshot) -> _Outline:
    """Return the snapshot without the values of its tensors."""
    weights, optimizer = _layouts(snapshot.weights), _layouts(snapshot.optimizer)
    return _Outline(snapshot.samples, weights, optimizer, snapshot.state)


def _layouts(tensors: Tensors) -> list[_Layout]:
    """Return name, type and shape of each tensor."""
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def _broadcast(
    layouts: list[_Layout], mine: Tensors | None, source: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of the rank `source`; `mine` are its tensors, else None."""
    for name, dtype, shape in layouts:
        tensor = torch.empty(shape, dtype=dtype) if mine is None else mine[name].contiguous()
        if tensor.numel() and dist.is_initialized():
            # As bytes, because a process group need not support the type.
            dist.broadcast(tensor.view(-1).view(torch.uint8), source)
        yield name, tensor
