"""Keras on JAX: one XLA FFI call inside `jit` takes all gradients, and reduces them in place.

Inputs and outputs of the call are aliased, so XLA passes the same memory for both, and knows that
it changes. Where the interface is another one, or the arrays are not in the memory of the CPU, JAX
calls us by `io_callback`, which copies. In neither way may the callback use `jax.numpy`, which can
deadlock.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax
import numpy as np
import torch
from jax.experimental import io_callback
from jax.experimental.sparse import BCOO
from torch import Tensor

from allstep.keras.bridges import xla_ffi
from allstep.keras_shared.gradient_reduction import Reduction

IN_PLACE = True

_Shape: Any = jax.ShapeDtypeStruct

# XLA never forgets a target: one for each reduction and list of gradients, by number.
_numbers = count()
_targets: WeakKeyDictionary[Reduction, dict[Any, str]] = WeakKeyDictionary()


def reduce(
    reduction: Reduction, grads: Sequence[Any], variables: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Reduce gradients, in a trace or at once. `variables` is not used."""
    given = [each.todense() if isinstance(each, BCOO) else each for each in grads]
    places = tuple(place for place, grad in enumerate(given) if grad is not None)
    shapes = tuple(_Shape(given[n].shape, given[n].dtype) for n in places)
    flag_shape = _Shape((), np.int32)
    call = _ffi_call if uses_ffi() else _callback
    flag, *results = call(reduction, len(given), places, (flag_shape, *shapes))(
        *(given[place] for place in places)
    )
    for place, result in zip(places, results, strict=True):
        given[place] = result
    return flag != 0, given


def wait() -> None:
    """Wait for steps that were started; raise the error of one that failed."""
    barrier: Any = jax.effects_barrier
    barrier()


def forget_error() -> None:
    """Let JAX drop the failed step, whose error every later wait would raise again."""
    try:
        from jax._src import dispatch

        tokens: Any = dispatch.runtime_tokens
        tokens.clear()
    except (AttributeError, ImportError):
        # Another version of JAX: it reports the error a second time when the process ends.
        return


def conditional(flag: Any, update: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Return what one of two functions returns, by the flag; in a trace when it runs."""
    if isinstance(flag, jax.core.Tracer):
        return jax.lax.cond(flag, update, skip)
    return (update if bool(flag) else skip)()


@cache
def uses_ffi() -> bool:
    """Return whether gradients can be reduced in XLA's own memory."""
    return jax.default_backend() == "cpu" and xla_ffi.is_supported()


# XLA's foreign function interface


def _ffi_call(
    reduction: Reduction, length: int, places: tuple[int, ...], shapes: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return a function of the gradients; its first result is the flag."""
    aliases = {number: number + 1 for number in range(len(places))}
    call: Callable[..., Any] = jax.ffi.ffi_call(
        _target(reduction, length, places, shapes),
        shapes,
        has_side_effect=True,
        input_output_aliases=aliases,
    )
    return call


def _target(
    reduction: Reduction, length: int, places: tuple[int, ...], shapes: tuple[Any, ...]
) -> str:
    """Return the name under which XLA knows the handler for these gradients."""
    known = _targets.setdefault(reduction, {})
    key = (length, places, tuple((shape.shape, str(shape.dtype)) for shape in shapes))
    if key not in known:
        name = f"allstep_keras_{next(_numbers)}"
        handler = _Handler(reduction, length, places, shapes)
        jax.ffi.register_ffi_target(name, xla_ffi.make_handler(handler), platform="cpu")
        known[key] = name
    return known[key]


class _Handler:
    """Reduces what is at the addresses that XLA passes."""

    def __init__(
        self,
        reduction: Reduction,
        length: int,
        places: tuple[int, ...],
        shapes: tuple[Any, ...],
    ) -> None:
        self._reduction = ref(reduction)
        self._length, self._places = length, places
        self._flag, *self._memory = [_Memory(shape) for shape in shapes]

    def __call__(self, arguments: Sequence[int], results: Sequence[int]) -> None:
        flag_address, *addresses = results
        arrays: list[Any] = [None] * self._length
        for place, memory, source, address in zip(
            self._places, self._memory, arguments, addresses, strict=True
        ):
            if source != address:
                ctypes.memmove(address, source, memory.nbytes)
            arrays[place] = memory.view(address)
        reduction = self._reduction()
        assert reduction is not None, "the optimizer of this function is gone"
        updates, reduced = reduction.step(arrays)
        self._flag.view(flag_address).fill_(int(updates))
        for place in self._places:
            if reduced[place] is not arrays[place]:
                arrays[place].copy_(reduced[place])


class _Memory:
    """Views of XLA's memory as torch tensors of one shape; XLA uses few addresses again."""

    def __init__(self, shape: Any) -> None:
        self._shape, self._dtype = tuple(shape.shape), getattr(torch, str(shape.dtype))
        self.nbytes = torch.Size(self._shape).numel() * self._dtype.itemsize
        self._views: dict[int, Tensor] = {}

    def view(self, address: int) -> Tensor:
        """Return the memory at an address."""
        found = self._views.get(address)
        if found is None:
            if len(self._views) >= 16:
                self._views.clear()
            found = self._views[address] = self._new_view(address)
        return found

    def _new_view(self, address: int) -> Tensor:
        if not self.nbytes:
            return torch.empty(self._shape, dtype=self._dtype)
        memory = (ctypes.c_char * self.nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=self._dtype).view(self._shape)


# Without it


def _callback(
    reduction: Reduction, length: int, places: tuple[int, ...], shapes: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return a function of the gradients that copies them; its first result is the flag."""

    def run(*given: Any) -> list[Any]:
        arrays: list[Any] = [None] * length
        for place, array in zip(places, given, strict=True):
            arrays[place] = _to_torch(np.array(array))
        updates, reduced = reduction.step(arrays)
        results = [_to_numpy(reduced[place]) for place in places]
        return [
            np.int32(updates),
            *(result.view(shape.dtype) for result, shape in zip(results, shapes[1:], strict=True)),
        ]

    return lambda *given: io_callback(run, list(shapes), *given, ordered=True)


def _to_torch(array: Any) -> Tensor:
    """Return an array's memory as a tensor; numpy's bfloat16 is unknown to torch."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_numpy(tensor: Any) -> Any:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
