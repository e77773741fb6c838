"""Where the time of a distributed step goes, by timers inside allstep.

| part | wall seconds of |
|---|---|
| waiting | waiting for other ranks in a collective |
| moving | copies into and out of memory that the ranks share, and what no other part covers |
| adding | computing the sums |
| preparing | the reduction of the list outside of its collectives, in Python |
| bridging | views from the framework's memory to torch and back |

The first three are recorded by the collectives (`comm.timeline.recorder`). The others are timers
around functions of allstep, which are installed only for the turn that is watched. What the
framework itself spends to call us (a `py_function`, an XLA custom call) is in none of them: the row
"bridge alone" includes it. A view of MXNet's memory waits for its threads, which still compute the
gradients; that is awaited before the timer starts.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from allstep.comm.timeline import recorder
from allstep.hvd.gradient_list import GradientList

_DLPACK = ["to_views", "to_tensorflow"]
# Functions of the bridges that are looked up when a step runs: (module, names).
_BRIDGES = {
    "keras-torch": ("allstep.keras.bridges.torch_bridge", ["_writable"]),
    "keras-tensorflow": ("allstep.keras_shared.tensorflow_bridge", _DLPACK),
    "keras-jax": ("allstep.keras.bridges.jax_bridge", ["_Handler.__call__"]),
    "tensorflow": ("allstep.tensorflow.calls", _DLPACK),
    "mxnet": ("allstep.mxnet.trainer", ["write_view"]),
}

Parts = dict[str, float]


def watching(framework: str) -> Callable[[Parts], AbstractContextManager[None]]:
    """Return a context that adds up the seconds of a turn by part."""
    return partial(_watching, framework)


@contextmanager
def _watching(framework: str, parts: Parts) -> Iterator[None]:
    module, names = _BRIDGES[framework]
    # JAX's handler includes the reduction.
    part = "crossing" if framework == "keras-jax" else "bridging"
    before, recorder.active = recorder.active, recorder.Recorder()
    with ExitStack() as ending:
        ending.enter_context(_timed(GradientList, "reduce", parts, "reduction"))
        for name in names:
            owner, function = _owner(importlib.import_module(module), name)
            ending.enter_context(_timed(owner, function, parts, part, _settle(framework)))
        try:
            yield
        finally:
            operations, _ = recorder.active.take()
            recorder.active = before
    _add_collectives(parts, operations)


def _add_collectives(parts: Parts, operations: list[recorder.RecordedOperation]) -> None:
    """Divide the time of reductions into that of collectives, by kind, and the rest."""
    reduction = parts.pop("reduction", 0.0)
    if "crossing" in parts:
        parts["bridging"] = parts.pop("crossing") - reduction
    collectives = 0.0
    for operation in operations:
        for kind, began, ended in recorder.spans(operation):
            parts[kind] += (ended - began) / 1e9
            collectives += (ended - began) / 1e9
    if reduction:
        parts["preparing"] = max(0.0, reduction - collectives)


def _owner(module: Any, name: str) -> tuple[Any, str]:
    """Return the module or class that has this function, and the function's name there."""
    *classes, function = name.split(".")
    return (getattr(module, classes[0]) if classes else module), function


def _settle(framework: str) -> Callable[[], None] | None:
    """Return a function that waits for the framework's own threads, where that is needed."""
    if framework != "mxnet":
        return None
    from allstep.mxnet.framework import mx

    wait: Callable[[], None] = mx.nd.waitall
    return wait


@contextmanager
def _timed(
    owner: Any, name: str, parts: Parts, part: str, settle: Callable[[], None] | None = None
) -> Iterator[None]:
    """Replace a function by one that adds its seconds to a part, after a call of `settle`."""
    function = getattr(owner, name)

    def timed(*args: Any, **named: Any) -> Any:
        if settle is not None:
            settle()
        started = time.perf_counter()
        try:
            return function(*args, **named)
        finally:
            parts[part] += time.perf_counter() - started

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, function)
