"""Runs at the start of every Python that a test starts: large libraries are imported uncollected.

`conftest.py` puts this folder on PYTHONPATH. While torch, its optimizers or another framework is
imported, the garbage collector would look at half a million objects again and again, and once more
at the exit of the process: that is about half of the processor time of a process that only trains a
few steps, and of those the tests start some thousand. What is made after the import, by allstep and
by the test's script, is collected as ever.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder

# `typing` is a module more in every process.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

LARGE = {"jax", "keras", "tensorflow", "tf_keras", "torch", "torch._dynamo"}


class UncollectedImports:
    """Finds large libraries as Python does, and pauses the collector while they are executed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in LARGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = uncollected(loader.exec_module)
        return spec


def uncollected(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            execute(module)
        finally:
            if was_enabled:
                gc.freeze()
                gc.enable()

    return exec_module


sys.meta_path.insert(0, UncollectedImports)
