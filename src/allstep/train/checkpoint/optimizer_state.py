"""An optimizer's state as tensors by name and plain numbers, and back: what a checkpoint can hold
without pickle.

torch numbers an optimizer's parameters in the order in which it got them. Here they have the names
of the model, so that a state that does not fit says which parameter it is about.

    state_dict()["state"][3]["momentum_buffer"]      <->
    tensors["features.0.weight/momentum_buffer"] state_dict()["state"][3]["step"], a tensor
    <->  tensors["features.0.weight/step"] state_dict()["state"][3]["flag"] = True          <->
    numbers["values"]["features.0.weight/flag"] state_dict()["param_groups"][0]["lr"]            <->
    numbers["groups"][0]["lr"]
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allstep.errors import CheckpointError

_PLAIN = (bool, int, float, str, type(None))
LARGEST = 1e30
"""Of any setting. Not a number, or infinite, is beyond it, too."""


def flatten(
    state: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """`state`, an optimizer's state_dict(), as tensors by name and plain values. names: of its
    parameters, in its order."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for number, entries in state["state"].items():
        for key, value in entries.items():
            place = f"{names[number]}/{key}"
            if isinstance(value, torch.Tensor):
                tensors[place] = value
            else:
                values[place] = _plain(place, value)
    groups = [
        {key: _plain(key, value) for key, value in group.items()} for group in state["param_groups"]
    ]
    return tensors, {"names": list(names), "values": values, "groups": groups}


def restore(
    tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """What `load_state_dict` takes. Raises CheckpointError when it belongs to other parameters."""
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
    """Return whether a setting is of the kind of another:

    None and switches, numbers, or as many numbers.
    """
    if isinstance(usual, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(usual)
            and all(map(is_like, value, usual))
        )
    if isinstance(usual, bool | None):
        return isinstance(value, bool | None)
    if isinstance(usual, int | float):
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
        )
    return isinstance(value, type(usual))


def _plain(place: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(place, each) for each in value]
    if isinstance(value, torch.Tensor) and value.ndim == 0:  # a rate that is kept as a tensor
        return value.item()
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(
        f"the optimizer keeps a {type(value).__name__} in {place!r}: a checkpoint holds tensors and"
        " numbers"
    )


def _tuples(value: Any) -> Any:
    """JSON knows no tuples; Adam's betas are one, and parameter numbers are a list of any length."""
    return (
        tuple(value)
        if isinstance(value, list) and all(isinstance(each, float) for each in value)
        else value
    )


def _difference(saved: Sequence[str], names: Sequence[str]) -> str:
    gone, new = (
        [name for name in saved if name not in names],
        [name for name in names if name not in saved],
    )
    if not gone and not new:
        return "they are the same, in another order"
    some = [
        f"only {where} has {', '.join(which[:3])}{' ...' if len(which) > 3 else ''}"
        for where, which in (("the checkpoint", gone), ("the net", new))
        if which
    ]
    return "; ".join(some)
