"""The state of a store's optimizer in a file: tensors as safetensors, the rest as JSON in it.

A file has whole values: it depends neither on slices nor on the number of workers.

    "0", "1", ...      tensors
    metadata "store"   {"optimizer": class and settings,
                        "keys": [[key, name, kind, number of the tensor], ...]}

The name "master weights" is that of a key's float32 master. The state of a key that has had no
update is absent, and loading leaves such a key without state.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from allstep.errors import CheckpointError, cut
from allstep.files.atomic import replace_file
from allstep.kvstore.memory.key_memory import StoredKey, short
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.updates.key_optimizer import KeyOptimizer
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.slice_state import StateEntry

MASTER = "master weights"

Named = tuple[str, str, Tensor]
"""Name, kind and value of a state."""

Expected = list[tuple[str, tuple[torch.dtype, int]]]
"""Name, type and number of elements of each state of a key."""


def whole_state(stored: StoredKey, optimizer: KeyOptimizer) -> list[Named]:
    """Return the state of a key, as copies. The caller has locked all slices."""
    if not any(each.has_state for each in stored.slices):
        return []
    found = [] if optimizer.master is None else [(MASTER, "tensor", optimizer.master.clone())]
    for place, entry in enumerate(optimizer.plan.entries[0]):
        parts = [state.views[place] for state in optimizer.states]
        found.append((entry.name, entry.kind, _joined(stored, entry, parts)))
    return found


def _joined(stored: StoredKey, entry: StateEntry, parts: list[Tensor]) -> Tensor:
    """Return one tensor for the parts of all slices, in the shape of the key where it fits."""
    # Such as a step count: that of the first slice, as all slices have made the same updates.
    value = torch.cat(parts) if _is_cut(stored, entry) else parts[0].clone()
    return value.view(stored.shape) if value.numel() == stored.form.numel else value


def _is_cut(stored: StoredKey, entry: StateEntry) -> bool:
    """Return whether the state has a value for each element, so that each slice has a part."""
    first = stored.slices[0]
    return len(stored.slices) > 1 and entry.shape == (first.end - first.start,)


def put_state(stored: StoredKey, optimizer: KeyOptimizer, values: Mapping[str, Tensor]) -> None:
    """Set the state of a key, as `whole_state` returned it. The caller has locked all slices."""
    if optimizer.master is not None and MASTER in values:
        optimizer.master.copy_(values[MASTER].reshape(-1))
    for place, entry in enumerate(optimizer.plan.entries[0]):
        value = values[entry.name]
        parts = (
            torch.split(value.reshape(-1), [each.end - each.start for each in stored.slices])
            if _is_cut(stored, entry)
            else [value] * len(stored.slices)
        )
        for state, part in zip(optimizer.states, parts, strict=True):
            state.views[place].copy_(part.view(state.views[place].shape))
    for each in stored.slices:
        each.has_state = True


def write_states(path: Path, chosen: OptimizerClass, states: Mapping[Key, list[Named]]) -> None:
    """Write the states of all keys; the file is whole or unchanged."""
    tensors: dict[str, Tensor] = {}
    listed = []
    for key, named in states.items():
        for name, kind, value in named:
            listed.append([key, name, kind, len(tensors)])
            tensors[str(len(tensors))] = value.contiguous()
    text = json.dumps({"optimizer": json.loads(chosen.to_json()), "keys": listed})
    replace_file(path, save(tensors, {"store": text}))


def read_states(path: Path, chosen: OptimizerClass) -> dict[Key, dict[str, Tensor]]:
    """Return the states of a file by key and name; CheckpointError if it cannot be used."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["store"])
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
        cls = about["optimizer"][0]
        found: dict[Key, dict[str, Tensor]] = {}
        for key, name, _, number in about["keys"]:
            found.setdefault(key, {})[name] = tensors[str(number)]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; expected one of save_optimizer_states") from (
            None
        )
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{path}: no file of save_optimizer_states ({cut(f'{type(error).__name__}: {error}')})"
        ) from error
    if cls != chosen.name:
        raise CheckpointError(
            f"{path}: the state of {cls}, but this store has {chosen.name}; call set_optimizer with"
            " the optimizer of the file first"
        )
    return found


def check_states(
    path: Path,
    expected: Mapping[Key, Expected],
    states: Mapping[Key, Mapping[str, Tensor]],
) -> None:
    """Raise CheckpointError if states do not fit the keys of the store."""
    for key, values in states.items():
        if key not in expected:
            raise CheckpointError(f"{path}: state of key {key!r}, which this store does not have")
        for name, (dtype, numel) in expected[key]:
            value = values.get(name)
            if value is None or (value.dtype, value.numel()) != (dtype, numel):
                text = "none" if value is None else f"{short(value.dtype)} of {value.numel()}"
                raise CheckpointError(
                    f"{path}: {name!r} of key {key!r} is {text}, expected {short(dtype)} of {numel}"
                    " elements; is it the state of another model or of other settings?"
                )


def expected_state(stored: StoredKey, optimizer: KeyOptimizer) -> Expected:
    """Return name, type and number of elements of each state of a key."""
    master = optimizer.master
    found: Expected = [] if master is None else [(MASTER, (master.dtype, master.numel()))]
    for entry in optimizer.plan.entries[0]:
        whole = stored.form.numel if _is_cut(stored, entry) else torch.Size(entry.shape).numel()
        found.append((entry.name, (entry.dtype, whole)))
    return found
