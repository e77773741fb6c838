"""Broadcasts of whole values: parameters, the state of an optimizer, any object."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allstep import faults
from allstep.engine import Request
from allstep.hvd import objects
from allstep.hvd.handles import enqueue_group, synchronize
from allstep.hvd.objects import broadcast_object
from allstep.hvd.place import rank
from allstep.hvd.process_sets import global_process_set
from allstep.hvd.requests import broadcasting

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(params: Mapping[str, Tensor] | list[Any], root_rank: int) -> None:
    """Copy the root's values to all ranks, in place.

    `params`: `model.state_dict()`, or a list of (name, tensor) or of tensors. `root_rank`: the rank
    whose values are sent.
    """
    if faults.active is not None:
        faults.active.in_phase("broadcast")
    named: list[tuple[str | None, Any]]
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(
            f"invalid params of type {type(params).__name__}: give model.state_dict(), or"
            " list(model.named_parameters())"
        )
    _broadcast_all(named, root_rank)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return a list of the objects `obj` of all ranks, by rank. They must be picklable."""
    return objects.allgather_object(obj, name)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copy the root's optimizer state and options (such as the learning rate) to all ranks.

    The root sends a description of its state, every rank allocates the tensors that it lacks, and
    the tensors follow. So no step is needed to create the state: weights and gradients do not
    change, and `model`, which Horovod needs for that step, is not used. Entries that the root lacks
    are removed.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "broadcast_optimizer_state does not support LBFGS: its history belongs to the closure"
            " of one rank"
        )
    owners = [param for group in optimizer.param_groups for param in group["params"]]
    described = _described(optimizer.state_dict()) if rank() == root_rank else None
    plan = broadcast_object(described, root_rank, "optimizer_state")
    _take_options(optimizer, plan["param_groups"])
    # With share_weights a rank holds only a slice of the state.
    with getattr(optimizer, "whole_state", nullcontext)():
        tensors = _take_state(optimizer, owners, plan["state"])
        seen: Counter[str] = Counter()
        named: list[tuple[str | None, Tensor]] = []
        for name, tensor in tensors:
            seen[name] += 1
            named.append((f"{name}.{seen[name]}", tensor))
        _broadcast_all(named, root_rank)


@dataclass(frozen=True)
class _Shape:
    """The description of a tensor that is sent separately."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "_Shape":
        return cls(tensor.shape, tensor.dtype, tensor.device.type == "cpu")

    def room(self, present: Any, owner: Any) -> Tensor:
        """Return the present tensor if it fits, else a new one on the device of its parameter."""
        device = (
            owner.device if isinstance(owner, Tensor) and not self.on_host else torch.device("cpu")
        )
        if (
            isinstance(present, Tensor)
            and (present.shape, present.dtype) == (self.shape, self.dtype)
            and present.device.type == device.type
        ):
            return present
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def _described(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict with descriptions instead of tensors, and options without parameters."""
    return {
        "state": {
            key: (
                {
                    name: _Shape.of(value) if isinstance(value, Tensor) else value
                    for name, value in entry.items()
                }
                if isinstance(entry, dict)
                else entry
            )
            for key, entry in state_dict["state"].items()
        },
        "param_groups": [
            {name: value for name, value in group.items() if name != "params"}
            for group in state_dict["param_groups"]
        ],
    }


def _take_options(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Copy the root's options into the optimizer; raise ValueError for other parameter groups."""
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"broadcast_optimizer_state: the root has {len(groups)} param groups, rank {rank()} has"
            f" {len(optimizer.param_groups)}"
        )
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        # The dict stays the same object, since schedulers and scripts keep references to it.
        group.update(options)


def _take_state(
    optimizer: torch.optim.Optimizer, owners: list[Tensor], described: dict[Any, Any]
) -> list[tuple[str, Tensor]]:
    """Give the state the root's structure; return the tensors to fill, ordered as on all ranks."""
    tensors = []
    keys = {number: owners[number] if isinstance(number, int) else number for number in described}
    for owner in [
        owner for owner in optimizer.state if not any(owner is key for key in keys.values())
    ]:
        del optimizer.state[owner]
    for number, entry in described.items():
        owner = keys[number]
        if not isinstance(entry, dict):
            optimizer.state[owner] = entry
            continue
        present = optimizer.state[owner]
        taken = {name: _taken(value, present.get(name), owner) for name, value in entry.items()}
        present.clear()
        present.update(taken)
        tensors += [
            (str(name), taken[name]) for name, value in entry.items() if isinstance(value, _Shape)
        ]
    return tensors


def _taken(value: Any, present: Any, owner: Any) -> Any:
    return value.room(present, owner) if isinstance(value, _Shape) else value


def _broadcast_all(named: Sequence[tuple[str | None, Tensor]], root_rank: int) -> None:
    """Copy the root's tensors to all ranks, in place.

    The requests are submitted as one group for each device, so that the ranks agree once instead of
    once for each tensor. The names are those of single broadcasts.
    """
    groups: dict[Any, list[Request]] = {}
    for name, tensor in named:
        request = broadcasting(tensor, tensor, root_rank, name, global_process_set)
        groups.setdefault(tensor.device, []).append(request)
    for handle in [enqueue_group(requests) for requests in groups.values()]:
        synchronize(handle)
