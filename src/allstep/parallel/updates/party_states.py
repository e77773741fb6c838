"""The optimizer's state of all parties in one checkpoint, for any number of parties.

With averaging each rank has inner optimizer state of its own: its momentum, its step count. In the
state of a parameter the first rank's entries have their usual keys, so that the plain optimizer can
load them; those of the other ranks follow:

```
momentum_buffer              rank 0's
party.1.momentum_buffer      rank 1's; tensors without dimensions as numbers
parties                      how many there are
outer_momentum               of the outer step, the same on all ranks
```

A world with as many ranks gives each rank its own state back, so that it continues with the same
bits. In a world of another size, every rank takes the mean of all of them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allstep.comm.group.process_group import AllstepGroup
from allstep.parallel.exchange.parameter_order import Named
from allstep.parallel.updates.flat_tensors import broadcast
from allstep.parallel.updates.trust_ratios import texts_of_all

OUTER = "outer_momentum"
PARTIES = "parties"
_PARTY = "party."

State = dict[str, Any]


def gather(
    group: AllstepGroup, named: Sequence[Named], state: Mapping[Any, State]
) -> dict[int, State]:
    """Return further entries of each parameter's state, by its number. All ranks call it together.

    They are those of the ranks after the first, and the number of ranks, for parameters with state;
    empty on all ranks but the first.
    """
    own = [dict(state.get(each.parameter, {})) for each in named]
    texts = texts_of_all(group, json.dumps([_described(entries) for entries in own]))
    found: dict[int, State] = {number: {} for number in range(len(named))}
    for rank in range(1, group.size()):
        described = json.loads(texts[rank])
        mine = own if rank == group.rank() else None
        for number, (dtype, shape, key), values in _tensors(group, rank, described, mine):
            found[number][f"{_PARTY}{rank}.{key}"] = values.view(getattr(torch, dtype)).view(shape)
        for number, (_, numbers) in enumerate(described):
            for key, value in numbers.items():
                found[number][f"{_PARTY}{rank}.{key}"] = value
    if group.rank() != 0:
        return {}
    return {
        number: {PARTIES: group.size(), **entries}
        for number, entries in found.items()
        if entries or own[number]
    }


def _described(entries: State) -> tuple[list[Any], State]:
    """Return the layout of the tensors, and all other values."""
    tensors = [
        (str(value.dtype).removeprefix("torch."), list(value.shape), key)
        for key, value in sorted(entries.items())
        if _is_array(value)
    ]
    numbers = {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in entries.items()
        if not _is_array(value)
    }
    return tensors, numbers


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _tensors(
    group: AllstepGroup, rank: int, described: list[Any], own: list[State] | None
) -> list[tuple[int, tuple[str, list[int], str], Tensor]]:
    """Return number, layout and bytes of the tensors of a rank, whose own state is `own`."""
    layouts = [(number, each) for number, (found, _) in enumerate(described) for each in found]
    sizes = [
        getattr(torch, dtype).itemsize * int(np.prod(shape)) for _, (dtype, shape, _) in layouts
    ]
    # In units of 8 bytes, so that the views of all dtypes are aligned.
    rooms = [-(-size // 8) * 8 for size in sizes]
    memory = torch.zeros(sum(rooms), dtype=torch.uint8)
    parts = [
        room[:size] for room, size in zip(torch.split_with_sizes(memory, rooms), sizes, strict=True)
    ]
    for part, (number, (*_, key)) in zip(parts, layouts if own is not None else (), strict=False):
        assert own is not None
        part.copy_(own[number][key].detach().cpu().contiguous().view(-1).view(torch.uint8))
    broadcast(group, [memory], rank)
    return [(number, layout, part) for (number, layout), part in zip(layouts, parts, strict=True)]


def num_parties(state: Mapping[Any, State]) -> int:
    """Return how many parties' states a loaded optimizer state has."""
    return max((int(entries.get(PARTIES, 1)) for entries in state.values()), default=1)


def taken(entries: State, parameter: Tensor, rank: int, size: int, parties: int) -> State:
    """Return the state of one parameter for the rank `rank` of `size`, from that of `parties`."""
    by_party = [_of_party(entries, party, parameter) for party in range(parties)]
    if parties == size:
        return by_party[rank]
    keys = dict.fromkeys(key for each in by_party for key in each)
    return {key: _mean([each[key] for each in by_party if key in each]) for key in keys}


def _of_party(entries: State, party: int, parameter: Tensor) -> State:
    if party == 0:
        return {
            key: value
            for key, value in entries.items()
            if key not in (OUTER, PARTIES) and not key.startswith(_PARTY)
        }
    start = f"{_PARTY}{party}."
    return {
        (name := key.removeprefix(start)): _like(value, entries.get(name), parameter)
        for key, value in entries.items()
        if key.startswith(start)
    }


def _like(value: Any, first: Any, parameter: Tensor) -> Any:
    """Return a value of a party as the optimizer keeps it; `first`: the first party's value."""
    if isinstance(value, Tensor):
        is_elementwise = value.shape == parameter.shape
        # The parameter's layout, as before, since sums add in that order.
        room = torch.empty_like(parameter if is_elementwise else value, dtype=value.dtype)
        return room.detach().copy_(value)
    return torch.tensor(value, dtype=first.dtype) if isinstance(first, Tensor) else value


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if len(values) == 1 or isinstance(first, bool | str | None):
        return first
    total = sum(values[1:], first)
    if isinstance(first, Tensor) and not first.is_floating_point():
        return first
    return total // len(values) if isinstance(first, int) else total / len(values)
