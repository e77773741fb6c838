"""What happens before the first step of a training with our callbacks.

A rank that trains more steps than the others, or another model, waits for a collective that the
others never start. So the ranks compare first, in one collective: the number of steps, the names
and shapes of the weights, the class of the optimizer, and which of our callbacks they use. All
ranks raise the same error, with the values of two ranks that differ.

Keras numbers the names of layers in each process (`dense`, `dense_1`), and ranks may have created
other layers before. So these numbers are not compared.
"""

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.hvd.objects import allgather_object
from allstep.hvd.place import rank, size

DISTRIBUTED_MODULE = "horovod._keras"
"""The module that the classes of distributed optimizers name, as in Horovod."""

_CALLBACKS = "allstep_callbacks"
_COMPARED = "allstep_compared"


@dataclass(frozen=True)
class Training:
    """What must be equal on all ranks. `weights`: None while a layer has none yet."""

    callbacks: tuple[str, ...]
    steps: int | None
    weights: tuple[tuple[str, tuple[int, ...]], ...] | None
    optimizer: str


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer comes from `hvd.DistributedOptimizer`."""
    return any(each.__module__ == DISTRIBUTED_MODULE for each in type(optimizer).__mro__)


def distributed_part(optimizer: Any) -> Any:
    """Return the distributed optimizer: this one or the one inside a LossScaleOptimizer; else None.

    Under a mixed_float16 policy, `compile` of Keras 2 puts a LossScaleOptimizer around ours.
    """
    nested = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return next((each for each in nested if is_distributed(each)), None)


def is_built(model: Any) -> bool:
    """Return whether all layers have their weights."""
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())


def weights_of(model: Any) -> list[Any]:
    """Return the weights that exist; a model of Keras 2 raises ValueError if it has none yet."""
    return list(model.weights) if model.built else []


def register(params: dict[str, Any], callback: str) -> None:
    """Record that a training has this callback, which communicates.

    `params`: the dict that Keras shares between all callbacks of one `fit`.
    """
    params.setdefault(_CALLBACKS, []).append(callback)


def compare_once(model: Any, params: dict[str, Any]) -> list[Training]:
    """Return the trainings of all ranks at the first call in a `fit`, and the same list later.

    Raise ValueError on all ranks if they differ.
    """
    if _COMPARED not in params:
        params[_COMPARED] = compare(describe(model, params))
        _warn_if_local(model)
    trainings: list[Training] = params[_COMPARED]
    return trainings


def describe(model: Any, params: dict[str, Any]) -> Training:
    """Return the training of this rank."""
    weights = [(without_numbers(path_of(each)), tuple(each.shape)) for each in weights_of(model)]
    return Training(
        callbacks=tuple(params.get(_CALLBACKS, ())),
        steps=params.get("steps"),
        weights=tuple(weights) if is_built(model) else None,
        optimizer=_class_of(model.optimizer),
    )


def compare(training: Training) -> list[Training]:
    """Return the trainings of all ranks; raise ValueError on all ranks if they differ."""
    if size() == 1:
        return [training]
    trainings = allgather_object(training, "keras.before_training")
    for describe_difference in _DIFFERENCES:
        difference = describe_difference(trainings)
        if difference:
            raise ValueError(f"the ranks differ before the first step: {difference}")
    return trainings


def without_xla(model: Any) -> None:
    """Switch XLA off: our collectives cannot run inside a function that it compiles.

    `model`: a model on TensorFlow; left alone if its optimizer is not distributed.
    """
    is_ours = distributed_part(getattr(model, "optimizer", None)) is not None
    if is_ours and model.jit_compile:
        model.jit_compile = False
        # A function that was compiled in an earlier `fit` would be used again.
        model.train_function = None
        if rank() == 0:
            line = "allstep: jit_compile=False for this model: XLA does not support its optimizer"
            print(line, file=sys.stderr)


def _differing(values: Sequence[Any]) -> int | None:
    """Return the first rank whose value is not that of rank 0; None if all are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def _different_callbacks(trainings: Sequence[Training]) -> str:
    found = [training.callbacks for training in trainings]
    other = _differing(found)
    if other is None:
        return ""
    return (
        f"rank 0 has the callbacks {_listed(found[0])}, rank {other} has {_listed(found[other])};"
        " give all ranks the same callbacks of hvd, in the same order"
    )


def _different_steps(trainings: Sequence[Training]) -> str:
    found = [training.steps for training in trainings]
    other = _differing(found)
    if other is None:
        return ""
    return (
        f"rank 0 trains {_number(found[0])} steps per epoch, rank {other} {_number(found[other])};"
        " give model.fit the same steps_per_epoch on all ranks, or data from hvd.batches"
    )


def _different_optimizers(trainings: Sequence[Training]) -> str:
    found = [training.optimizer for training in trainings]
    other = _differing(found)
    if other is None:
        return ""
    return (
        f"the optimizer of rank 0 is {found[0]}, that of rank {other} is {found[other]}; compile"
        " the model with the same optimizer on all ranks"
    )


def _different_weights(trainings: Sequence[Training]) -> str:
    built = {rank: each.weights for rank, each in enumerate(trainings) if each.weights is not None}
    for other, weights in built.items():
        first = min(built)
        mine = built[first] or ()
        found = _different_weight(mine, weights or (), first, other)
        if found:
            return f"{found}; create the same model on all ranks"
    return ""


def _different_weight(mine: Sequence[Any], others: Sequence[Any], first: int, other: int) -> str:
    """Describe the first weight in which two models differ; "" if there is none."""
    for number, (one, two) in enumerate(zip(mine, others, strict=False)):
        if one != two:
            return (
                f"weight {number} of rank {first} is {_weight(one)}, that of rank {other} is"
                f" {_weight(two)}"
            )
    if len(mine) != len(others):
        return (
            f"the model of rank {first} has {len(mine)} weights, that of rank {other} has"
            f" {len(others)}"
        )
    return ""


_DIFFERENCES: tuple[Callable[[Sequence[Training]], str], ...] = (
    _different_callbacks,
    _different_weights,
    _different_optimizers,
    _different_steps,
)


def _warn_if_local(model: Any) -> None:
    if size() > 1 and rank() == 0 and distributed_part(model.optimizer) is None:
        # A loss-scale optimizer of Keras 2 cannot be wrapped, but the one inside it can.
        name = type(getattr(model.optimizer, "inner_optimizer", model.optimizer)).__name__
        warnings.warn(
            f"{size()} workers train, but the optimizer {name} is not distributed: every worker"
            f" trains a model of its own; write hvd.DistributedOptimizer({name}(...)) in compile",
            stacklevel=2,
        )


def _class_of(optimizer: Any) -> str:
    """Return the class of an optimizer, of the optimizer inside it, and whether it reduces."""
    text = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        text = f"{text}({_class_of(inner)})"
    return f"DistributedOptimizer({text})" if is_distributed(optimizer) else text


def path_of(weight: Any) -> str:
    """Return the name of a weight with its layer: a variable of Keras 2 has it in its name."""
    path: str = getattr(weight, "path", weight.name)
    return path.split(":")[0]


def without_numbers(path: str) -> str:
    """Return a path with `dense` for `dense_1`: Keras numbers the layers of each process."""
    return "/".join(re.sub(r"_\d+$", "", each) for each in path.split("/"))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _number(steps: int | None) -> str:
    return "an unknown number of" if steps is None else str(steps)


def _weight(named: tuple[str, tuple[int, ...]]) -> str:
    return f"{named[0]} {list(named[1])}"
