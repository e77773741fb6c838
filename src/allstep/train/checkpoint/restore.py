"""From a checkpoint back to a model and its optimizer: what does not fit is said by name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from allstep.errors import CheckpointError
from allstep.train.checkpoint import optimizer_state
from allstep.train.checkpoint.files import Snapshot, Tensors
from allstep.train.checkpoint.names import name_of
from allstep.train.step.ema import Average

AVERAGE = "/average"
"""Ends the name of a tensor of the moving average, among those of the optimizer."""


def load_weights(model: nn.Module, weights: Tensors, where: str = "the checkpoint") -> None:
    """The checkpoint's weights.

    Raises CheckpointError with the tensors that differ when it is of another model.
    """
    ours, theirs = model.state_dict(), weights
    if problems := list(differences(ours, theirs)):
        some = "; ".join(problems[:4]) + (
            f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        )
        raise CheckpointError(f"{where}: belongs to another net: {some}")
    model.load_state_dict(dict(theirs))


def differences(ours: Tensors, theirs: Tensors) -> list[str]:
    """In which tensors two models differ, in words."""
    words = [f"the checkpoint has no {name}" for name in ours if name not in theirs]
    words += [f"the net has no {name}" for name in theirs if name not in ours]
    for name in ours:
        if name in theirs and (ours[name].shape, ours[name].dtype) != (
            theirs[name].shape,
            theirs[name].dtype,
        ):
            words.append(
                f"{name} is {_like(theirs[name])} in the checkpoint and {_like(ours[name])} in"
                " the net"
            )
    return words


def _like(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def averaged_weights(snapshot: Snapshot) -> Tensors:
    """The moving average of the weights, or nothing where the run had none."""
    return {
        name.removesuffix(AVERAGE): tensor
        for name, tensor in snapshot.optimizer.items()
        if name.endswith(AVERAGE)
    }


def optimizer_tensors(snapshot: Snapshot) -> Tensors:
    """The optimizer's own."""
    return {
        name: tensor for name, tensor in snapshot.optimizer.items() if not name.endswith(AVERAGE)
    }


def with_weights(model: nn.Module, snapshot: Snapshot, where: str = "the checkpoint") -> nn.Module:
    """A model that is evaluated as the checkpoint's was: with its weights, or with their moving
    average where there is one."""
    load_weights(model, snapshot.weights, where)
    averaged = averaged_weights(snapshot)
    if not averaged:
        return model
    average = Average(model, decay=0.5)
    average.load(averaged, updates=0)
    return average.model


def load_optimizer(optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> None:
    """Load the checkpoint's state into an optimizer that is not yet shared out.

    CheckpointError when it does not fit.
    """
    try:
        _load(optimizer, snapshot)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"checkpoint {name_of(snapshot.samples)}: the optimizer's state does not fit ({words});"
            " move that checkpoint away to continue from the one before"
        ) from error


def _load(optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> None:
    names = parameter_names(optimizer.state_dict())
    state = optimizer_state.restore(optimizer_tensors(snapshot), snapshot.state["optimizer"], names)
    for ours, theirs in zip(optimizer.param_groups, state["param_groups"], strict=True):
        _check_settings(ours, theirs)
    optimizer.load_state_dict(state)
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                # Laid out like it, as before: sums add in that order.
                entries[key] = torch.empty_like(
                    parameter, dtype=value.dtype, requires_grad=False
                ).copy_(value)


def _check_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """TypeError for a setting of the checkpoint's optimizer that is not of the kind that this
    optimizer has."""
    for name in ours.keys() - {"params", "param_names"}:
        value, found = ours[name], theirs.get(name, ours[name])
        if not optimizer_state.is_like(found, value):
            raise TypeError(f"{name} is {str(found)[:40]!r}, expected something like {value!r}")


def parameter_names(state: Mapping[str, Any]) -> list[str]:
    """Names of the parameters in the order of an optimizer's state_dict."""
    return [name for group in state["param_groups"] for name in group["param_names"]]
