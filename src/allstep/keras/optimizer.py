"""`DistributedOptimizer` for Keras 3: any Keras optimizer, with the gradients of all ranks.

    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), ...)

The result is an object of a new class: a subclass of the wrapped optimizer's class, with the same
name, whose `apply` reduces first. All three backends call this method: TensorFlow's
`apply_gradients`, torch's training step, and JAX's `stateless_apply`. Clipping, accumulation
(`gradient_accumulation_steps`), weight decay and EMA come after it and give the result of one
worker.

Two differences from Horovod: a custom loop that calls `apply_gradients` is reduced, too, unless the
gradients came from our DistributedGradientTape; and under
a mixed_float16 policy the result is a LossScaleOptimizer around the given one, so that all ranks
skip the same steps.
"""

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import keras
import torch
from keras.src import backend

from allstep.hvd.reduced_marks import is_reduced, without_reduced
from allstep.keras.bridges import bridge
from allstep.keras.public_names import register_like
from allstep.keras_shared.gradient_reduction import Reduction, Settings, Spec
from allstep.keras_shared.wrapped_optimizers import AggregationHelper, LocalVariables

_INSIDE = (
    "another optimizer around a distributed one (LossScaleOptimizer, also by a mixed_float16 model;"
    " MultiOptimizer) lets each rank skip steps on its own, and the others wait: wrap the outer"
    " one, hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(opt)), or set the"
    " mixed_float16 policy before you call hvd.DistributedOptimizer(opt)"
)


def distributed(optimizer: Any, settings: Settings) -> Any:
    """Return an optimizer like this one of Keras 3 that applies the gradients of all ranks."""
    # Raises for a backend of Keras that cannot train.
    bridge()
    _check_optimizer(optimizer)
    return _wrapped(_with_loss_scale(optimizer), settings)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, Distributed):
        raise ValueError(
            f"{type(optimizer).__name__} is a distributed optimizer already: call"
            " hvd.DistributedOptimizer once"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        found = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise ValueError(
            f"expected an optimizer of Keras 3, e.g. keras.optimizers.SGD(0.01), found {found}"
        )


# The wrapped optimizer


def _with_loss_scale(optimizer: Any) -> Any:
    """Return the optimizer, under a mixed_float16 policy inside a LossScaleOptimizer."""
    scaled = keras.optimizers.LossScaleOptimizer
    if keras.config.dtype_policy().name != "mixed_float16" or isinstance(optimizer, scaled):
        return optimizer
    return scaled(optimizer, name="loss_scale_optimizer")


def _wrapped(optimizer: Any, settings: Settings) -> Any:
    """Return an optimizer of a new subclass, with the configuration and state of `optimizer`."""
    base = type(optimizer)
    attributes = {"__module__": "horovod._keras", "_settings": settings}
    made_class: Any = types.new_class(
        base.__name__, (Distributed, base), exec_body=lambda names: names.update(attributes)
    )
    register_like(made_class, base)
    made = made_class.from_config(optimizer.get_config(), **_custom_objects(optimizer))
    if optimizer.built:
        copy_state(optimizer, made)
    return made


def _custom_objects(optimizer: Any) -> dict[str, Any]:
    """Return the argument of `from_config` with the class of an inner optimizer."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return {} if inner is None else {"custom_objects": {type(inner).__name__: type(inner)}}


def copy_state(source: Any, target: Any) -> None:
    """Give an optimizer the variables of another one with the same configuration."""
    target.build(source._trainable_variables)
    for old, new in zip(source.variables, target.variables, strict=True):
        new.assign(old)


class _Variables(list[Any]):
    """A list that can be called, since older scripts write `optimizer.variables()`."""

    def __call__(self) -> list[Any]:
        return list(self)


class Distributed:
    """The methods that are added to the class of a Keras optimizer."""

    _layer_class = keras.layers.Layer
    _settings: Settings
    _trainable_variables: list[Any]
    _is_reduced = False

    @cached_property
    def _reduction(self) -> Reduction:
        return Reduction(self._settings, in_place=bridge().IN_PLACE)

    @cached_property
    def _local(self) -> LocalVariables:
        return LocalVariables()

    @cached_property
    def _agg_helper(self) -> AggregationHelper | None:
        return AggregationHelper(self._reduction) if self._settings.passes > 1 else None

    @property
    def variables(self) -> _Variables:
        """The variables of the optimizer, as an attribute or by a call."""
        return _Variables(super().variables)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to become the inner optimizer of another one, which resets this attribute."""
        if name == "loss_scale_factor" and value is None and "_iterations" in self.__dict__:
            raise ValueError(_INSIDE)
        super().__setattr__(name, value)

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable on this rank."""
        self._local.variables.append(var)
        self.__dict__.pop("_prepared_for", None)

    # Reducing

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Update the variables with the gradients of all ranks."""
        if self._is_reduced or not len(grads):
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        variables = self._built_with(trainable_variables)
        flag, reduced = self._reduced(list(grads), variables)

        def update() -> None:
            super(Distributed, self).apply(reduced, trainable_variables)  # type: ignore[misc]

        if self._settings.passes == 1:
            update()
        else:
            bridge().conditional(flag, update, self._count_pass)

    def stateless_apply(
        self, optimizer_variables: list[Any], grads: list[Any], trainable_variables: list[Any]
    ) -> Any:
        """Return the variables after an update with the gradients of all ranks; JAX calls it.

        A LossScaleOptimizer has a method of its own that does not call `apply`, so the gradients
        are reduced here.
        """
        flag, reduced = self._reduced(list(grads), self._trainable_variables)

        def update() -> Any:
            with self._not_again():
                return super(Distributed, self).stateless_apply(  # type: ignore[misc]
                    optimizer_variables, reduced, trainable_variables
                )

        if self._settings.passes == 1:
            return update()
        return bridge().conditional(
            flag, update, lambda: self._stateless_pass(optimizer_variables, trainable_variables)
        )

    def _built_with(self, variables: Any) -> list[Any]:
        """Return the variables of a step; build the optimizer if this is its first one."""
        if variables is None:
            return self._trainable_variables
        step_variables = list(variables)
        if not self.built:  # type: ignore[has-type]
            with backend.name_scope(self.name, caller=self):  # type: ignore[attr-defined]
                self.build(step_variables)  # type: ignore[attr-defined]
            self.built = True
        return step_variables

    def _reduced(self, grads: list[Any], variables: list[Any]) -> tuple[Any, list[Any]]:
        """Return whether to update now, and the reduced gradients of these variables."""
        everything = self._trainable_variables
        if self.__dict__.get("_prepared_for") is not everything:
            self._reduction.prepare(self._specs())
            self.__dict__["_prepared_for"] = everything
        unreduced = without_reduced(grads, self._settings.passes)
        # On torch a rank may have no gradient at all and has to call the others all the same.
        if any(map(is_reduced, grads)) and all(grad is None for grad in unreduced):
            return True, grads
        places = [self._get_variable_index(each) for each in variables]  # type: ignore[attr-defined]
        all_grads = [None] * len(everything)
        for place, grad in zip(places, unreduced, strict=True):
            all_grads[place] = grad
        flag, reduced = bridge().reduce(self._reduction, all_grads, everything)
        return flag, [
            grad if is_reduced(grad) else reduced[place]
            for place, grad in zip(places, grads, strict=True)
        ]

    def _specs(self) -> tuple[Spec, ...]:
        local = self._local.keys(self._var_key)  # type: ignore[attr-defined]
        return tuple(
            _spec(number, variable, self._var_key(variable) in local)  # type: ignore[attr-defined]
            for number, variable in enumerate(self._trainable_variables)
        )

    @contextmanager
    def _not_again(self) -> Iterator[None]:
        """Pass gradients through `apply` that are reduced already."""
        self.__dict__["_is_reduced"] = True
        try:
            yield
        finally:
            self.__dict__["_is_reduced"] = False

    # A pass without an update

    def _counted(self) -> Any:
        """Return the variable that counts steps; a LossScaleOptimizer uses its inner one's."""
        counting: Any = getattr(self, "inner_optimizer", self)
        return counting._iterations

    def _count_pass(self) -> None:
        self._counted().assign_add(1)

    def _stateless_pass(self, optimizer_variables: list[Any], variables: list[Any]) -> Any:
        counted = self._counted()
        values = [
            value + 1 if variable is counted else value
            for variable, value in zip(self.variables, optimizer_variables, strict=True)
        ]
        return list(variables), values


def _spec(number: int, variable: Any, is_local: bool) -> Spec:
    """Describe a variable. Its number distinguishes it, since layers are numbered per process."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    name = f"{number}/{variable.name}"
    return Spec(name, tuple(variable.shape), getattr(torch, dtype), is_local)
