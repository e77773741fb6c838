"""A copy of a state dict in memory that is allocated once.

`copy.deepcopy` allocates new memory for every tensor at every commit, and the page faults of that
memory cost several times the copy itself. `SavedValues` keeps one buffer for each tensor, by its
place in the state dict, and copies into it as long as shape, dtype and device stay.

```
{"state": {0: {"momentum_buffer": tensor}}, "param_groups": [{"lr": 0.1}]}

("state", 0, "momentum_buffer")   -> a buffer, filled again at each save
("param_groups", 0, "lr")         -> a copy of the number
```

Tensors that are the same memory (tied weights) share a buffer. Tensors with memory of another kind
(sparse, quantized, subclasses), and all other values, are copied by `copy.deepcopy`.

`restored` writes into the tensors that exist now, so that objects which refer to them stay right.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]
_Leaf = Callable[[Path, Any], Any]


class SavedValues:
    """The copy of one state dict: nested dicts and lists with tensors and other values."""

    def __init__(self) -> None:
        self._saved: Any = None
        self._buffers: dict[Path, Tensor] = {}

    @torch.no_grad()
    def save(self, values: Any) -> None:
        """Copy these values; tensors into the memory of the last copy, where they fit."""
        pairs: list[tuple[Tensor, Tensor]] = []
        buffers: dict[Path, Tensor] = {}
        of_memory: dict[Any, Tensor] = {}

        def copied(path: Path, value: Any) -> Any:
            if not _is_plain(value):
                return copy.deepcopy(value)
            memory = _memory_of(value)
            if memory not in of_memory:
                buffer = self._buffers.get(path)
                if buffer is None or not _fits(buffer, value):
                    buffer = torch.empty_like(value)
                of_memory[memory] = buffer
                pairs.append((buffer, value))
            buffers[path] = of_memory[memory]
            return of_memory[memory]

        saved = _mapped(values, copied)
        _copy_all(pairs)
        # Buffers of values that are gone are freed.
        self._saved, self._buffers = saved, buffers

    @torch.no_grad()
    def restored(self, present: Any) -> Any:
        """Return the saved values, in the tensors of `present` where they fit.

        Tensors without one are new: later changes of the result do not reach the saved values.
        """
        pairs: list[tuple[Tensor, Tensor]] = []

        def taken(path: Path, value: Any) -> Any:
            if not _is_plain(value):
                return copy.deepcopy(value)
            live = _at(present, path)
            if not (_is_plain(live) and _fits(live, value) and _is_writable(live)):
                return value.clone()
            pairs.append((live, value))
            return live

        result = _mapped(self._saved, taken)
        _copy_all(pairs)
        return result


def _mapped(value: Any, leaf: _Leaf, path: Path = ()) -> Any:
    """Return a structure with `leaf(path, value)` in place of each value in dicts and lists."""
    if type(value) in (dict, OrderedDict):
        made = type(value)((key, _mapped(each, leaf, (*path, key))) for key, each in value.items())
        # The state dict of a module has versions of its parts in an attribute.
        if type(value) is OrderedDict and hasattr(value, "_metadata"):
            made._metadata = copy.deepcopy(value._metadata)
        return made
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, leaf, (*path, place)) for place, each in enumerate(value))
    return leaf(path, value)


def _at(values: Any, path: Path) -> Any:
    """Return the value at a place; None if there is none."""
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _is_plain(value: Any) -> bool:
    """Return whether this is a tensor whose bytes are all there is to it."""
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and not value.is_quantized
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
    )


def _is_writable(tensor: Tensor) -> bool:
    """Return whether each element has memory of its own: not an expanded tensor."""
    return all(
        stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _memory_of(tensor: Tensor) -> Any:
    """Return what two tensors with the same memory have in common; unique for an empty one."""
    if not tensor.numel():
        return id(tensor)
    place = tensor.device, tensor.data_ptr()
    return *place, tensor.dtype, tensor.shape, tensor.stride()


def _fits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first; one call for all, which saves time."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources))
