"""What a Keras 2 model with a distributed optimizer does differently, from `compile` on.

As in `allstep.keras.compiled_models`: an error in the reduction keeps its class when it leaves
`fit`, and XLA, which cannot call us, is switched off. `Model.compile` is wrapped once, by `import
allstep.keras2`, also that of the class that Keras 2 uses in a graph of `tf.compat.v1`; models whose
optimizer is not distributed stay as they are.
"""

import functools
import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tf_keras
from tf_keras.src.engine.training_v1 import Model as GraphModel

from allstep.keras_shared.before_training import distributed_part

Kept = tuple[BaseException, BaseException | None]
"""An error and its cause."""

_LOG = logging.getLogger("allstep.keras2")


@functools.cache
def install() -> None:
    """Wrap Keras's `compile`, once."""
    for model_class in (tf_keras.Model, GraphModel):
        model_class.compile = _compile_and_adopt(model_class.compile)


def _compile_and_adopt(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_and_adopt(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        adopt(self)
        return result

    return compile_and_adopt


def adopt(model: Any) -> None:
    """Prepare a model with a distributed optimizer; a no-op for others."""
    if distributed_part(model.optimizer) is None:
        return
    for name in ("fit", "train_on_batch"):
        # Not as an attribute: Keras tracks those.
        model.__dict__[name] = types.MethodType(_with_own_errors(name), model)
    if getattr(model, "_jit_compile", None):
        model.jit_compile = False
        _LOG.warning("XLA is off for %s: TensorFlow's XLA cannot call allstep", model.name)


@contextmanager
def own_errors(optimizer: Any) -> Iterator[None]:
    """Raise an error of the optimizer's reduction in the block as what it was."""
    # Of a loop that called the optimizer itself, before.
    _take_error(optimizer)
    try:
        yield
    except Exception:
        kept = _take_error(optimizer)
        if kept is not None:
            raise kept[0] from kept[1]
        raise


def _take_error(optimizer: Any) -> Kept | None:
    """Return the first error that a reduction of the optimizer keeps, and forget all of them."""
    part = distributed_part(optimizer)
    reductions = [] if part is None else list(part._reductions.values())
    kept = [error for each in reductions if (error := each.take_error()) is not None]
    return kept[0] if kept else None


def _with_own_errors(name: str) -> Callable[..., Any]:
    """Return a method that calls the one of the model's class."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with own_errors(self.optimizer):
            return getattr(type(self), name)(self, *args, **kwargs)

    return call
