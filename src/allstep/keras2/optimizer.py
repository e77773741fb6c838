"""`DistributedOptimizer` for Keras 2: new and legacy optimizers, with the gradients of all ranks.

The result is an object of a new class: a subclass of the wrapped optimizer's class, with the same
name. It reduces where Keras 2 adds the gradients of its replicas, which every way to a step passes:

| optimizer | method | called by |
|---|---|---|
| `tf.keras.optimizers.SGD` | `aggregate_gradients` | `apply_gradients`, a LossScaleOptimizer |
| `tf.keras.optimizers.legacy.SGD` | `_aggregate_gradients` | `apply_gradients`, the same |

Clipping, weight decay and EMA come after it. `fit`, `minimize` and a custom loop that calls
`apply_gradients` are reduced alike (in Horovod the last one is not), unless the gradients came from
our DistributedGradientTape, or `apply_gradients` is called with `skip_gradients_aggregation=True`
(legacy: `experimental_aggregate_gradients=False`).

The methods that return gradients (`compute_gradients`; legacy: `_compute_gradients` and
`get_gradients`) return those of all ranks, as in Horovod, with a mark so that they are not reduced
again. A LossScaleOptimizer around the result, which `compile` adds under a mixed_float16 policy,
changes what they return, so for it they are those of this rank: it calls the methods of the table,
and then looks for infinities, so all ranks skip a step together.
"""

import types
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import tensorflow as tf
import tf_keras

from allstep.hvd.reduced_marks import is_reduced, mark_reduced, without_reduced
from allstep.keras2.dialect import build_optimizer, is_legacy
from allstep.keras_shared import tensorflow_bridge as bridge
from allstep.keras_shared.before_training import path_of, without_numbers
from allstep.keras_shared.gradient_reduction import Reduction, Settings, Spec
from allstep.keras_shared.wrapped_optimizers import AggregationHelper, LocalVariables
from allstep.tensorflow.bridge import torch_dtype

Pairs = list[tuple[Any, Any]]
"""Gradients with their variables."""


def distributed(optimizer: Any, settings: Settings) -> Any:
    """Return an optimizer like this one of Keras 2 that applies the gradients of all ranks."""
    if isinstance(optimizer, Distributed):
        raise ValueError(
            f"{type(optimizer).__name__} is a distributed optimizer already: call"
            " hvd.DistributedOptimizer once"
        )
    if hasattr(optimizer, "inner_optimizer"):
        raise ValueError(
            f"{type(optimizer).__name__}: wrap the inner optimizer, LossScaleOptimizer("
            "hvd.DistributedOptimizer(opt)); it then reduces before it looks for infinities"
        )
    base = type(optimizer)
    mixin = LegacyDistributed if is_legacy(optimizer) else NewDistributed
    made_class: Any = types.new_class(
        base.__name__, (mixin, base), exec_body=lambda names: names.update(_names(base, settings))
    )
    return _with_state_of(optimizer, made_class)


def _names(base: type, settings: Settings) -> dict[str, Any]:
    """Return what the new class has of its own: also the names under which Keras saves it."""
    public = {name: each for name, each in base.__dict__.items() if name.endswith("_api_names")}
    return {"__module__": "horovod._keras", "_settings": settings, **public}


def _with_state_of(optimizer: Any, made_class: Any) -> Any:
    """Return an optimizer with this configuration; one that has state hands its variables over."""
    has_state = optimizer.weights if is_legacy(optimizer) else getattr(optimizer, "_built", False)
    if not has_state:
        return made_class.from_config(optimizer.get_config())
    made = made_class.__new__(made_class)
    made.__dict__.update(optimizer.__dict__)
    return made


class Distributed:
    """The methods that are added to the class of a Keras 2 optimizer.

    What it keeps is in `__dict__`: Keras would save other attributes with the model.
    """

    _layer_class = tf_keras.layers.Layer
    _settings: Settings

    @cached_property
    def _reductions(self) -> dict[Any, Reduction]:
        """The reductions by their variables: one, unless a loop trains parts of a model in turn."""
        return {}

    @cached_property
    def _owners(self) -> dict[Any, list[Any]]:
        """Weak references to the variables of each reduction."""
        return {}

    @property
    def _reduction(self) -> Reduction:
        """The reduction of the last traced step."""
        return list(self._reductions.values())[-1]

    @cached_property
    def _local(self) -> LocalVariables:
        return LocalVariables()

    @property
    def _agg_helper(self) -> AggregationHelper | None:
        uses_passes = self._settings.passes > 1 and self._reductions
        return AggregationHelper(self._reduction) if uses_passes else None

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable on this rank."""
        self._local.variables.append(var)
        self._reductions.clear()
        self._owners.clear()

    # Reducing

    def _returned(self, pairs: Pairs) -> Pairs:
        """Return the pairs of a method that computes gradients, reduced and marked."""
        if getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):
            return pairs
        reduced = self._reduced(pairs)
        self.__dict__["_returned_last"] = [mark_reduced(grad) for grad, _ in reduced]
        return reduced

    def _has_returned(self, pairs: Pairs) -> bool:
        """Return whether these gradients came from the last call of such a method."""
        last = self.__dict__.get("_returned_last", ())
        return any(grad is each for grad, _ in pairs for each in last if each is not None)

    def _reduced(self, pairs: Iterable[tuple[Any, Any]]) -> Pairs:
        """Return the pairs with the gradients of all ranks."""
        pairs = list(pairs)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        unreduced = without_reduced(grads, self._settings.passes)
        if all(grad is None for grad in unreduced):
            self.__dict__["_updates_now"] = True
            return pairs
        flag, reduced = bridge.reduce(self._reduction_of(variables), unreduced, variables)
        self.__dict__["_updates_now"] = flag
        return [
            (old if is_reduced(old) else new, variable)
            for (old, variable), new in zip(pairs, reduced, strict=True)
        ]

    def _reduction_of(self, variables: Sequence[Any]) -> Reduction:
        self._forget_ended()
        key = tuple(map(id, variables))
        if key not in self._reductions:
            local = self._local.keys(id)
            reduction = Reduction(self._settings, in_place=bridge.IN_PLACE)
            reduction.prepare(
                tuple(_spec(n, each, id(each) in local) for n, each in enumerate(variables))
            )
            self._reductions[key] = reduction
            self._owners[key] = [weakref.ref(each) for each in variables]
        return self._reductions[key]

    def _forget_ended(self) -> None:
        """Drop the reductions of variables that are gone: others may get their ids."""
        for key, owners in list(self._owners.items()):
            if any(owner() is None for owner in owners):
                del self._owners[key]
                self._reductions.pop(key, None)

    # Several passes

    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **how: Any) -> Any:
        """Update the variables; with several passes per step, only in the last of them."""
        apply: Any = super().apply_gradients  # type: ignore[misc]
        if self._settings.passes == 1:
            return apply(grads_and_vars, name=name, **how)
        pairs = list(grads_and_vars)
        is_aggregated = _is_aggregated(how) or self._has_returned(pairs)
        pairs = pairs if is_aggregated else self._reduced(pairs)
        build_optimizer(self, [variable for _, variable in pairs])
        own = {"experimental_aggregate_gradients": False}
        return bridge.conditional(
            self.__dict__["_updates_now"],
            lambda: apply(pairs, name=name, **own),
            lambda: self.iterations.assign_add(1, read_value=False),  # type: ignore[attr-defined]
        )


def _is_aggregated(how: dict[str, Any]) -> bool:
    """Return whether the caller of `apply_gradients` has reduced: a LossScaleOptimizer does."""
    aggregates: bool = how.get("experimental_aggregate_gradients", True)
    return not aggregates or how.get("skip_gradients_aggregation", False)


class NewDistributed(Distributed):
    """For the optimizers of `tf.keras.optimizers`."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """Return the gradients of all ranks with their variables."""
        return self._returned(super().compute_gradients(*args, **kwargs))  # type: ignore[misc]

    def aggregate_gradients(self, grads_and_vars: Any) -> Pairs:
        """Return the gradients of all ranks; Keras calls it before it clips."""
        return self._reduced(grads_and_vars)


class LegacyDistributed(Distributed):
    """For the optimizers of `tf.keras.optimizers.legacy`."""

    def _compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """Return the gradients of all ranks with their variables."""
        return self._returned(super()._compute_gradients(*args, **kwargs))  # type: ignore[misc]

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Return the gradients of all ranks, in a graph of `tf.compat.v1`."""
        grads = super().get_gradients(loss, params)  # type: ignore[misc]
        pairs = list(zip(grads, tf.nest.flatten(params), strict=True))
        return [grad for grad, _ in self._returned(pairs)]

    def _aggregate_gradients(self, grads_and_vars: Any) -> list[Any]:
        """Return the gradients of all ranks; Keras calls it before it clips."""
        return self._reduced(grads_and_vars)


def _spec(number: int, variable: Any, is_local: bool) -> Spec:
    """Describe a variable. Its number distinguishes it, since layers are numbered per process."""
    dtype = torch_dtype(tf.as_dtype(variable.dtype).base_dtype)
    name = without_numbers(path_of(variable))
    return Spec(f"{number}/{name}", tuple(variable.shape), dtype, is_local)
