"""What a model with a distributed optimizer does differently, from `compile` on.

- An error in the reduction keeps its class: TensorFlow and JAX raise errors of their own, and `fit`
  raises the original one instead.
- On TensorFlow, XLA cannot call us: it is switched off.

Both are attached to the model by a wrapper of Keras's `Trainer.compile`, installed by `import
allstep.keras`. It changes only models whose optimizer is distributed. Where `compile` is not
the method that was read (Keras 3.15), a warning is given and Keras is left as it is.
"""

import functools
import inspect
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer

from allstep.keras.bridges import bridge

_LOG = logging.getLogger("allstep.keras")
_READ = {"optimizer", "jit_compile", "run_eagerly"}


@functools.cache
def install() -> None:
    """Wrap Keras's `compile`, once."""
    original = Trainer.compile
    signature = inspect.signature(original)
    if not set(signature.parameters) >= _READ or not hasattr(Trainer, "fit"):
        warnings.warn(
            f"keras {keras.__version__} has another Trainer.compile than 3.15: errors of allstep"
            " inside model.fit may have another class, and on TensorFlow you need"
            " model.compile(..., jit_compile=False)",
            stacklevel=3,
        )
        return

    @functools.wraps(original)
    def compile_and_adopt(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        adopt(self, is_auto=given.get("jit_compile", "auto") == "auto")
        return result

    Trainer.compile = compile_and_adopt


def adopt(model: Any, *, is_auto: bool) -> None:
    """Prepare a model with a distributed optimizer; a no-op for others.

    `is_auto`: Keras, not the user, chose whether XLA compiles the model.
    """
    if not hasattr(model.optimizer, "_reduction"):
        return
    for name, method in _METHODS.items():
        setattr(model, name, types.MethodType(method, model))
    if not model.jit_compile:
        return
    if is_auto and _on_tensorflow():
        model.jit_compile = False
        _LOG.warning("XLA is off for %s: TensorFlow's XLA cannot call allstep", model.name)
    elif keras.backend.backend() == "torch":
        bridge().leave_compiled_code()


@contextmanager
def own_errors(optimizer: Any) -> Iterator[None]:
    """Raise an error of the optimizer's reduction in the block as what it was."""
    reduction = getattr(optimizer, "_reduction", None)
    if reduction is None:
        yield
        return
    reduction.take_error()
    try:
        yield
        bridge().wait()
    except Exception:
        _raise_kept(reduction)
        raise
    _raise_kept(reduction)


def _raise_kept(reduction: Any) -> None:
    """Raise the error of the reduction, if there is one."""
    kept = reduction.take_error()
    if kept is not None:
        error, cause = kept
        bridge().forget_error()
        raise error from cause


def _with_own_errors(name: str) -> Callable[..., Any]:
    """Return a method that calls the one of the model's class."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with own_errors(self.optimizer):
            return getattr(type(self), name)(self, *args, **kwargs)

    return call


def _make_train_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what Keras does, unless XLA would compile the function on TensorFlow."""
    reduction = getattr(self.optimizer, "_reduction", None)
    uses_xla = self.jit_compile and not self.run_eagerly
    if reduction is not None and uses_xla and _on_tensorflow():
        raise ValueError(
            "jit_compile=True with a distributed optimizer: TensorFlow's XLA cannot call allstep."
            " Leave jit_compile out of model.compile()"
        )
    before = self.train_function
    result = type(self).make_train_function(self, *args, **kwargs)
    if reduction is not None and self.train_function is not before:
        self.train_function = _checked(self.train_function, reduction)
    return result


def _checked(train_function: Callable[..., Any], reduction: Any) -> Callable[..., Any]:
    """Return a training step that ends `fit` after an error.

    JAX runs steps later, and Keras reads their results in a way that hides errors.
    """

    @functools.wraps(train_function)
    def step(*args: Any, **kwargs: Any) -> Any:
        reduction.raise_error()
        return train_function(*args, **kwargs)

    return step


def _on_tensorflow() -> bool:
    return bool(keras.backend.backend() == "tensorflow")


_METHODS: dict[str, Callable[..., Any]] = {
    "fit": _with_own_errors("fit"),
    "train_on_batch": _with_own_errors("train_on_batch"),
    "make_train_function": _make_train_function,
}
