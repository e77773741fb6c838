"""Conversion of an optimizer's state to named tensors and plain numbers, for a checkpoint without
pickle, and back.

torch numbers the parameters of an optimizer in their order. A checkpoint uses the names of the
model instead, so that an error can name the parameter that does not fit.

```
state_dict()["state"][3]["momentum_buffer"]    <-> tensors["features.0.weight/momentum_buffer"]
state_dict()["state"][3]["step"], a tensor     <-> tensors["features.0.weight/step"]
state_dict()["state"][3]["flag"] = True        <-> numbers["values"]["features.0.weight/flag"]
state_dict()["param_groups"][0]["lr"]          <-> numbers["groups"][0]["lr"]
```
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allstep.errors import CheckpointError

_PLAIN = (bool, int, float, str, type(None))
MAX_VALUE = 1e30
"""Upper limit of any setting; NaN and infinity are beyond it, too."""


def flatten(
    state: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return an optimizer's state_dict() as tensors by name and plain values.

    `names` are the names of its parameters in the optimizer's order.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for number, entries in state["state"].items():
        for key, value in entries.items():
            place = f"{names[number]}/{key}"
            if isinstance(value, torch.Tensor):
                tensors[place] = value
            else:
                values[place] = _plain(place, value)
    param_groups = state["param_groups"]
    groups = [{key: _plain(key, value) for key, value in each.items()} for each in param_groups]
    return tensors, {"names": list(names), "values": values, "groups": groups}


def restore(
    tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Return the argument of `load_state_dict` from what `flatten` returned.

    Raise CheckpointError if the state belongs to other parameters than `names`.
    """
    if list(numbers["names"]) != list(names):
        raise CheckpointError(
            "the optimizer's state belongs to other parameters:"
            f" {_difference(numbers['names'], names)}"
        )
    number_of = {name: number for number, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    for place, value in {**numbers["values"], **tensors}.items():
        name, _, key = place.rpartition("/")
        state.setdefault(number_of[name], {})[key] = value
    groups = [{key: _tuples(value) for key, value in group.items()} for group in numbers["groups"]]
    return {"state": state, "param_groups": groups}


def is_like(value: Any, usual: Any) -> bool:
    """Return whether a setting has the type of another one.

    The types are: switch or None, finite number, as many elements of the same types, any other
    type.
    """
    if isinstance(usual, list | tuple):
        is_as_long = isinstance(value, list | tuple) and len(value) == len(usual)
        return is_as_long and all(map(is_like, value, usual))
    if isinstance(usual, bool | None):
        return isinstance(value, bool | None)
    if isinstance(usual, int | float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and abs(value) <= MAX_VALUE
    return isinstance(value, type(usual))


def _plain(place: str, value: Any) -> Any:
    """Return a setting as plain values; raise CheckpointError if that is not possible."""
    if isinstance(value, list | tuple):
        return [_plain(place, each) for each in value]
    # A learning rate may be stored as a tensor.
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(
        f"the optimizer's state has a {type(value).__name__} in {place!r}: a checkpoint can hold"
        " only tensors and numbers"
    )


def _tuples(value: Any) -> Any:
    """Return a list of floats as a tuple, other values unchanged.

    JSON has no tuples. Adam's betas are a tuple; parameter numbers are a list.
    """
    is_floats = isinstance(value, list) and all(isinstance(each, float) for each in value)
    return tuple(value) if is_floats else value


def _difference(saved: Sequence[str], names: Sequence[str]) -> str:
    """Return which parameter names only the checkpoint or only the model has."""
    missing = [name for name in saved if name not in names]
    new = [name for name in names if name not in saved]
    if not missing and not new:
        return "they are the same, in another order"
    some = [
        f"only {where} has {', '.join(which[:3])}{' ...' if len(which) > 3 else ''}"
        for where, which in (("the checkpoint", missing), ("the model", new))
        if which
    ]
    return "; ".join(some)
