"""Loading a checkpoint into a model and its optimizer; errors name the tensors that do not fit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from allstep.errors import CheckpointError
from allstep.train.checkpoint import optimizer_state
from allstep.train.checkpoint.names import name_of
from allstep.train.checkpoint.write_and_read import Snapshot, Tensors
from allstep.train.step.ema import Average

EMA_SUFFIX = "/average"
"""End of the names of the EMA's tensors, which are stored among those of the optimizer."""


def load_weights(model: nn.Module, weights: Tensors, where: str = "the checkpoint") -> None:
    """Load the checkpoint's weights into `model`.

    `where` names the checkpoint in errors. Raise CheckpointError with the tensors that differ if
    the checkpoint is of another model.
    """
    ours, theirs = model.state_dict(), weights
    if problems := list(differences(ours, theirs)):
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        some = "; ".join(problems[:4]) + more
        raise CheckpointError(f"{where}: belongs to another model: {some}")
    model.load_state_dict(dict(theirs))


def differences(ours: Tensors, theirs: Tensors) -> list[str]:
    """Return one line per tensor in which a model and a checkpoint differ."""
    lines = [f"the checkpoint has no {name}" for name in ours if name not in theirs]
    lines += [f"the model has no {name}" for name in theirs if name not in ours]
    for name in ours:
        if name in theirs and (ours[name].shape, ours[name].dtype) != (
            theirs[name].shape,
            theirs[name].dtype,
        ):
            lines.append(
                f"{name} is {_like(theirs[name])} in the checkpoint and {_like(ours[name])} in"
                " the model"
            )
    return lines


def _like(tensor: torch.Tensor) -> str:
    """Return type and shape of a tensor as text."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def averaged_weights(snapshot: Snapshot) -> Tensors:
    """Return the EMA of the weights; empty if the run had none."""
    return {
        name.removesuffix(EMA_SUFFIX): tensor
        for name, tensor in snapshot.optimizer.items()
        if name.endswith(EMA_SUFFIX)
    }


def optimizer_tensors(snapshot: Snapshot) -> Tensors:
    """Return the optimizer's tensors, without those of the EMA."""
    return {
        name: tensor for name, tensor in snapshot.optimizer.items() if not name.endswith(EMA_SUFFIX)
    }


# What a parameter group has besides settings.
_PARAMETERS = ("params", "param_names")


def with_weights(model: nn.Module, snapshot: Snapshot, where: str = "the checkpoint") -> nn.Module:
    """Return a model for evaluation, with the checkpoint's weights or their EMA where there is one.

    `model` is changed. `where` names the checkpoint in errors.
    """
    load_weights(model, snapshot.weights, where)
    averaged = averaged_weights(snapshot)
    if not averaged:
        return model
    average = Average(model, decay=0.5)
    average.load(averaged, updates=0)
    return average.model


def load_optimizer(optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> None:
    """Load the checkpoint's state into an optimizer.

    The state of the optimizer must not be distributed over ranks yet. Raise CheckpointError if the
    state does not fit.
    """
    try:
        _load(optimizer, snapshot)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"checkpoint {name_of(snapshot.samples)}: the optimizer's state does not fit"
            f" ({reason}); move that checkpoint away to resume from the one before"
        ) from error


def _load(optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> None:
    """Load the state; raise an error of any type if it does not fit."""
    names = parameter_names(optimizer.state_dict())
    state = optimizer_state.restore(optimizer_tensors(snapshot), snapshot.state["optimizer"], names)
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    state["param_groups"] = [_fitted(ours, theirs) for ours, theirs in groups]
    optimizer.load_state_dict(state)
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                # Same memory layout as the parameter, as before, since sums add in that order.
                like = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                entries[key] = like.copy_(value)


def _fitted(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group of the checkpoint with the settings that the optimizer has.

    A checkpoint of another version of torch may lack settings, or have others. Raise TypeError if a
    setting has another type than the optimizer's.
    """
    fitted = {name: theirs[name] for name in _PARAMETERS if name in theirs}
    for name, value in ours.items():
        if name in _PARAMETERS:
            continue
        fitted[name] = theirs.get(name, value)
        if not optimizer_state.is_like(fitted[name], value):
            raise TypeError(
                f"{name} is {str(fitted[name])[:40]!r}, expected something like {value!r}"
            )
    return fitted


def parameter_names(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters in the order of an optimizer's state_dict."""
    return [name for group in state["param_groups"] for name in group["param_names"]]
