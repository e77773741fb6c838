"""Checks of sparse gradients and row numbers, with one clear line for each mistake."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import StoredKey, short
from allstep.kvstore.updates.row_updates import Rows


def are_sparse(values: Sequence[Any]) -> bool:
    """Return whether a push has a sparse gradient among its values."""
    return any(isinstance(each, Tensor) and each.layout is not torch.strided for each in values)


def pushed(stored: StoredKey, values: Sequence[Any]) -> Rows:
    """Return the sum of sparse gradients of a key: each row once, in increasing order."""
    parts = [_gradient(stored, each) for each in values]
    first = parts[0]
    if len(parts) > 1:
        numbers = torch.cat([each._indices() for each in parts], 1)
        rows = torch.cat([each._values() for each in parts])
        first = torch.sparse_coo_tensor(numbers, rows, stored.shape, check_invariants=False)
    whole = first.coalesce()
    numbers = whole.indices()[0]
    _check_range(f"push of key {stored.key!r}: the gradient has rows", stored, numbers)
    found: Tensor = whole.values().reshape(numbers.numel(), stored.form.width)
    return Rows(numbers.cpu(), found.cpu())


def _gradient(stored: StoredKey, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.layout is torch.strided:
        raise UserError(
            f"push of key {stored.key!r}: some of its values are sparse and others are not; pass"
            " value.to_dense() for all of them"
        )
    gradient: Tensor = value.detach()
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1 or gradient.dim() < 2:
        raise UserError(
            f"push of key {stored.key!r}: the gradient is not made of rows; expected a sparse COO"
            " tensor with sparse_dim 1, as of nn.Embedding(sparse=True), or pass value.to_dense()"
        )
    _check_form("push", stored, gradient)
    return gradient


def output(stored: StoredKey, out: Any) -> Tensor:
    """Return the sparse tensor that a row_sparse_pull fills."""
    if not isinstance(out, Tensor) or out.layout is not torch.sparse_coo:
        raise UserError(
            f"row_sparse_pull: the out of key {stored.key!r} is not a sparse COO tensor; pass one"
            " of the key's shape, or call pull for all rows"
        )
    _check_form("row_sparse_pull", stored, out)
    return out


def _check_form(call: str, stored: StoredKey, value: Tensor) -> None:
    if value.shape != stored.shape or value.dtype != stored.dtype:
        raise UserError(
            f"{call}: key {stored.key!r} is {stored.form}, found {short(value.dtype)}"
            f" {list(value.shape)}; pass a tensor of that shape and type"
        )


def row_numbers(stored: StoredKey, given: Any) -> Tensor:
    """Return the numbers of the rows to pull: each once, in increasing order."""
    if not stored.shape:
        raise UserError(f"row_sparse_pull: key {stored.key!r} is a single number without rows")
    numbers = torch.as_tensor(given).reshape(-1)
    if numbers.numel() and (numbers.is_floating_point() or numbers.dtype is torch.bool):
        raise UserError(f"row_sparse_pull: row_ids are {short(numbers.dtype)}; expected integers")
    found: Tensor = torch.unique(numbers.to(torch.int64))
    _check_range("row_sparse_pull: row_ids", stored, found)
    return found


def _check_range(what: str, stored: StoredKey, numbers: Tensor) -> None:
    """Raise UserError if numbers, in increasing order, are no rows of the key."""
    if numbers.numel() and not 0 <= int(numbers[0]) <= int(numbers[-1]) < stored.shape[0]:
        raise UserError(
            f"{what} from {int(numbers[0])} to {int(numbers[-1])}, but key {stored.key!r} has rows"
            f" 0 to {stored.shape[0] - 1}"
        )


def ids_for(row_ids: Any, place: int, num_outs: int) -> Any:
    """Return the row numbers for one of several outs; one tensor counts for all of them."""
    if isinstance(row_ids, Tensor) or not any(isinstance(each, Tensor) for each in row_ids):
        return row_ids
    if len(row_ids) == 1:
        return row_ids[0]
    if len(row_ids) != num_outs:
        raise UserError(
            f"row_sparse_pull: {len(row_ids)} row_ids for {num_outs} outs; expected one, or one for"
            " each out"
        )
    return row_ids[place]
