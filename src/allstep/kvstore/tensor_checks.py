"""Checks of the tensors that a script passes to a store, with one clear line for each mistake."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import StoredKey, short
from allstep.kvstore.rules.key_lists import Key


def new_value(call: str, key: Key, values: Sequence[Any]) -> Tensor:
    """Return the value of a new key."""
    if len(values) != 1:
        raise UserError(f"{call}: {len(values)} values for key {key!r}; expected one to start with")
    value = _dense(call, key, values[0])
    return value.detach()


def known(call: str, key: Key, keys: dict[Key, StoredKey]) -> StoredKey:
    """Return a key of the store."""
    stored = keys.get(key)
    if stored is None:
        names = [each for each in keys if isinstance(each, str)]
        near = get_close_matches(str(key), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"{call}: key {key!r} is not among the {len(keys)} keys of the store; call init for it"
            f" first{hint}"
        )
    return stored


def pushed(call: str, stored: StoredKey, values: Sequence[Any]) -> Tensor:
    """Return the sum of the values of a key, flat."""
    if not values:
        raise UserError(f"{call}: no value for key {stored.key!r}")
    first, *others = (_flat(call, stored, value) for value in values)
    if not others:
        return first
    total = first.clone()
    for other in others:
        total.add_(other)
    return total


def _flat(call: str, stored: StoredKey, value: Any) -> Tensor:
    tensor = _fitting(call, stored, value)
    flat = flattened(tensor)
    return flat if flat.is_cpu else flat.cpu()


def flattened(tensor: Tensor) -> Tensor:
    """Return a tensor with one dimension and without a gradient; the same one if it can."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def _fitting(call: str, stored: StoredKey, value: Any) -> Tensor:
    """Return a dense tensor of the key's shape and type."""
    tensor = _dense(call, stored.key, value)
    if tensor.shape != stored.shape or tensor.dtype != stored.dtype:
        raise UserError(
            f"{call}: key {stored.key!r} is {stored.form}, found {short(tensor.dtype)}"
            f" {list(tensor.shape)}; pass a tensor of that shape and type"
        )
    return tensor


def _dense(call: str, key: Key, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise UserError(
            f"{call}: the value of key {key!r} is a {type(value).__name__}; expected a torch tensor"
        )
    if value.layout is not torch.strided:
        raise UserError(
            f"{call}: the value of key {key!r} is sparse, and only push takes sparse gradients;"
            " pass value.to_dense()"
        )
    return value


def outputs(
    call: str, stored: StoredKey, outs: Sequence[Any], ignore_sparse: bool = False
) -> list[Tensor]:
    """Return the tensors that a pull fills. ignore_sparse: leave sparse ones out."""
    found = [out for out in outs if not (ignore_sparse and _is_sparse(out))]
    for out in found:
        if _is_sparse(out):
            raise UserError(
                f"{call}: the out of key {stored.key!r} is sparse and pull returns all rows; pass a"
                " dense tensor, or call row_sparse_pull"
            )
        _fitting(call, stored, out)
    return [out.detach() if out.requires_grad else out for out in found]


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is not torch.strided
