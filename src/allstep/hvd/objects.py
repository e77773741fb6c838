"""Sends Python objects between ranks, for every front-end.

Objects are sent as bytes of cloudpickle, so lambdas and classes of the main script can be sent.
Only the ranks of this job can send them.
"""

import io
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from allstep.hvd.handles import enqueue, perform, synchronize
from allstep.hvd.place import rank
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import broadcasting, gathering, named


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on all ranks; the root gets its own object back.

    `obj` is ignored on other ranks than `root_rank` (default: 0). `name`: as for all operations,
    see `allstep.torch` (default: "broadcast_object").
    """
    name = name or "broadcast_object"
    is_root = rank() == root_rank
    data = _to_bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    perform(broadcasting(length, length, root_rank, f"{name}.sz", process_set))
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    perform(broadcasting(data, data, root_rank, f"{name}.t", process_set))
    return obj if is_root else _from_bytes(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return a list of the objects `obj` of all ranks of the set, by rank.

    The objects must be picklable. `name`: as for all operations (default: "allgather_object").
    """
    name = name or "allgather_object"
    data = _to_bytes(obj)
    length = torch.tensor([len(data)])
    lengths = enqueue(gathering(length, named("allgather", f"{name}.sz"), process_set))
    gathered = enqueue(gathering(data, named("allgather", f"{name}.t"), process_set))
    return [
        _from_bytes(each) for each in synchronize(gathered).split(synchronize(lengths).tolist())
    ]


def _to_bytes(obj: Any) -> Tensor:
    buffer = io.BytesIO()
    cloudpickle.dump(obj, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return cloudpickle.loads(data.numpy())
