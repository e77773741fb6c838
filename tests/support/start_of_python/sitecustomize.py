"""Runs at the start of every Python that a test starts: large libraries cost half the time.

`conftest.py` puts this folder on PYTHONPATH; the tests start some thousand processes.

While torch, its optimizers or another framework is imported, the garbage collector would look at
half a million objects again and again, and once more at the exit of the process. So it pauses. What
is made after the import, by allstep and by the test's script, is collected as ever.

The first optimizer of a process imports the compiler, `torch._dynamo`: as much again as torch. All
that an optimizer does with it is to ask for graph breaks while something is compiled, and nothing is
before something else has imported it. So optimizers do not import it. Once it is imported, all
functions are torch's own again.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder

# `typing` is a module more in every process.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, ModuleType
    from typing import Any

LARGE = {"jax", "keras", "tensorflow", "tf_keras", "torch", "torch._dynamo"}


class PreparedImports:
    """Finds large libraries as Python does, and pauses the collector while they are executed.

    Also changes the modules of CHANGED, right after they are executed.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in LARGE and name not in CHANGED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = prepared(loader.exec_module, CHANGED.get(name))
        return spec


def prepared(
    execute: Callable[[ModuleType], None], change: Callable[[ModuleType], None] | None
) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            execute(module)
            if change is not None:
                change(module)
        finally:
            if was_enabled:
                gc.freeze()
                gc.enable()

    return exec_module


# Optimizers without the compiler

DISABLED: list[Any] = []
"""Functions that the compiler shall not look into; without it, they are called as they are."""
STEPS: list[tuple[Any, CodeType]] = []
"""Wrappers of `step` methods, each with its own code."""


def call_directly(compile_module: ModuleType) -> None:
    """Let the wrappers of `_disable_dynamo` find what they would make with the compiler's help."""
    original: Any = compile_module._disable_dynamo

    def _disable_dynamo(fn: Any = None, recursive: bool = True) -> Any:
        if fn is not None and "torch._dynamo" not in sys.modules:
            fn.__dynamo_disable = fn
            DISABLED.append(fn)
        return original(fn, recursive)

    compile_module._disable_dynamo = _disable_dynamo  # type: ignore[attr-defined]


def step_directly(optimizer_module: ModuleType) -> None:
    """Give the wrappers of `step` the code of torch's, without graph breaks."""
    original: Any = optimizer_module._use_grad_for_differentiable

    def wrapper(func: Any) -> Any:
        def _use_grad(*args: Any, **kwargs: Any) -> Any:
            self = args[0]
            prev_grad = torch.is_grad_enabled()  # type: ignore[name-defined] # noqa: F821
            try:
                torch.set_grad_enabled(self.defaults["differentiable"])  # type: ignore[name-defined] # noqa: F821
                return func(*args, **kwargs)
            finally:
                torch.set_grad_enabled(prev_grad)  # type: ignore[name-defined] # noqa: F821

        return _use_grad

    code: CodeType = wrapper(None).__code__

    def _use_grad_for_differentiable(func: Any) -> Any:
        wrapped = original(func)
        if "torch._dynamo" not in sys.modules:
            STEPS.append((wrapped, wrapped.__code__))
            wrapped.__code__ = code
        return wrapped

    optimizer_module._use_grad_for_differentiable = _use_grad_for_differentiable  # type: ignore[attr-defined]


def restore(dynamo: ModuleType) -> None:
    """Make all functions torch's own again: from now on something may be compiled."""
    for function in DISABLED:
        del function.__dynamo_disable
    for wrapped, code in STEPS:
        wrapped.__code__ = code


CHANGED = {
    "torch._compile": call_directly,
    "torch.optim.optimizer": step_directly,
    "torch._dynamo": restore,
}

sys.meta_path.insert(0, PreparedImports)
