"""Updates of some rows of a key: weights and optimizer state of all other rows stay as they are.

The optimizer of the key updates the rows that a gradient has, gathered from the value and from its
state, as one small tensor; the results are scattered back. So a push costs what its rows cost,
whatever the size of the table.

**Lazy state.** What an optimizer keeps for each element (momentum, Adam's means, Adagrad's sums)
changes with the gradients of that row only. A dense gradient of zeros would let momentum decay and
move the weights of every row, and weight decay would shrink them. What it keeps once (Adam's step
count) counts the pushes of the key. `torch.optim.SparseAdam` works in the same way.

A row that is touched for the first time starts from the state that a gradient of zero leaves:
zeros, or Adagrad's `initial_accumulator_value`. So SGD with `dampening` weighs the first gradient
of a row less than torch does, unless it comes with the first push of the key.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import StoredKey
from allstep.kvstore.memory.row_batches import Batch, rows_of
from allstep.kvstore.updates.key_optimizer import KeyOptimizer
from allstep.kvstore.updates.optimizer_class import OptimizerClass


class Rows(NamedTuple):
    """Some rows of a matrix. numbers: int64, each once, increasing. values: a row for each."""

    numbers: Tensor
    values: Tensor

    def within(self, first: int, end: int) -> "Rows":
        """Return the rows with numbers from `first` to before `end`."""
        bounds = torch.tensor([first, end])
        low, high = torch.searchsorted(self.numbers, bounds).tolist()
        return Rows(self.numbers[low:high], self.values[low:high])


def check_rows(stored: StoredKey, chosen: OptimizerClass | None) -> None:
    """Raise UserError if the optimizer cannot update rows."""
    if chosen is not None and chosen.is_whole:
        raise UserError(
            f"push of key {stored.key!r}: {chosen.cls.__name__} uses norms of whole layers, and"
            " the gradient has some rows only; push value.to_dense(), or choose an optimizer such"
            " as SGD, Adam or Adagrad"
        )


def apply_rows(stored: StoredKey, optimizer: KeyOptimizer | None, batch: Batch, rows: Rows) -> None:
    """Update a locked batch with its part of `rows`, with odd versions while it changes.

    Without an optimizer the rows replace the value: all other rows become zero.
    """
    part = rows.within(*rows_of(batch, stored.form.width))
    for each in batch:
        each.begin()
    with torch.no_grad():
        if optimizer is None:
            stored.flat[batch[0].start : batch[-1].end].zero_()
            table_of(stored, stored.flat).index_copy_(0, part.numbers, part.values)
        else:
            _update_rows(stored, optimizer, batch, part)
    for each in batch:
        each.finish()


def table_of(stored: StoredKey, flat: Tensor) -> Tensor:
    """Return a flat tensor of the key's size as a matrix of its rows."""
    return flat.view(stored.form.num_rows, stored.form.width)


def sum_of_rows(parts: Sequence[Rows], first: int, end: int) -> Rows:
    """Return the sum of the rows from `first` to before `end`, added in the order of `parts`."""
    parts = [rows.within(first, end) for rows in parts]
    if len(parts) == 1:
        return parts[0]
    numbers = torch.unique(torch.cat([rows.numbers for rows in parts]))
    total = parts[0].values.new_zeros(numbers.numel(), parts[0].values.shape[1])
    for rows in parts:
        total.index_add_(0, torch.searchsorted(numbers, rows.numbers), rows.values)
    return Rows(numbers, total)


def dense_slice(rows: Rows, width: int, start: int, end: int) -> Tensor:
    """Return the elements from `start` to before `end` of the matrix that has these rows."""
    first, last = start // width, -(-end // width)
    part = rows.within(first, last)
    dense = rows.values.new_zeros(last - first, width)
    dense.index_copy_(0, part.numbers - first, part.values)
    return dense.view(-1)[start - first * width : end - first * width]


def as_sparse(stored: StoredKey, rows: Rows) -> Tensor:
    """Return rows as a sparse COO tensor of the shape of the key."""
    values = rows.values.view(rows.numbers.numel(), *stored.shape[1:])
    return torch.sparse_coo_tensor(
        rows.numbers.unsqueeze(0), values, stored.shape, is_coalesced=True, check_invariants=False
    )


def _update_rows(stored: StoredKey, optimizer: KeyOptimizer, batch: Batch, rows: Rows) -> None:
    """Update the rows, and the state of the batch's slices."""
    for run in _runs(batch):
        part = rows.within(*rows_of(run, stored.form.width))
        source = table_of(stored, optimizer.source)
        values = source.index_select(0, part.numbers).view(-1)
        state = _gathered(stored, optimizer, run, part.numbers) if run[0].has_state else None
        state = optimizer.update_alone(values, part.values.reshape(-1), state)
        source.index_copy_(0, part.numbers, values.view(part.values.shape))
        if optimizer.master is not None:
            halves = values.view(part.values.shape).to(stored.dtype)
            table_of(stored, stored.flat).index_copy_(0, part.numbers, halves)
        _scatter(stored, optimizer, run, part.numbers, state)


def _runs(batch: Batch) -> list[Batch]:
    """Cut a batch where slices with state end: a killed worker may leave some without."""
    if batch[0].has_state == batch[-1].has_state:
        return [batch]
    return [[each] for each in batch]


def _gathered(
    stored: StoredKey, optimizer: KeyOptimizer, batch: Batch, numbers: Tensor
) -> dict[str, Any]:
    """Return the state of rows, as the optimizer has it."""
    state: dict[str, Any] = {}
    optimizer.states[batch[0].index].load(state)
    for entry, table, is_cut in _entries(optimizer):
        if is_cut:
            state[entry.name] = table_of(stored, table).index_select(0, numbers).view(-1)
        elif entry.kind == "tensor":
            # The optimizer changes it in place, and the next slice needs the one before.
            state[entry.name] = state[entry.name].clone()
    return state


def _scatter(
    stored: StoredKey,
    optimizer: KeyOptimizer,
    batch: Batch,
    numbers: Tensor,
    state: dict[str, Any],
) -> None:
    """Store the state of rows, and what their slices have once."""
    is_new = not batch[0].has_state
    blank = _blank_state(optimizer.chosen, optimizer.plan.dtype) if is_new else {}
    for entry, table, is_cut in _entries(optimizer):
        value = state[entry.name]
        if is_cut:
            if is_new:
                table[batch[0].start : batch[-1].end].fill_(blank[entry.name])
            rows = table_of(stored, table)
            rows.index_copy_(0, numbers, value.view(-1, stored.form.width))
            continue
        once = table[batch[0].index : batch[-1].index + 1]
        if entry.kind == "tensor":
            once[:, : value.numel()] = value.reshape(-1)
        else:
            once.fill_(value)
    for each in batch:
        each.has_state = True


def _entries(optimizer: KeyOptimizer) -> Sequence[tuple[Any, Tensor, bool]]:
    plan = optimizer.plan
    return list(zip(plan.entries[0], optimizer.tables, plan.is_cut, strict=True))


def _blank_state(chosen: OptimizerClass, dtype: torch.dtype) -> dict[str, float]:
    """Return what the optimizer keeps for an element after a gradient of zero."""
    parameter = Parameter(torch.zeros(1, dtype=dtype), requires_grad=False)
    optimizer = chosen.make([parameter])
    parameter.grad = torch.zeros(1, dtype=dtype)
    optimizer.step()
    state = optimizer.state.get(parameter, {})
    return {name: float(value) for name, value in state.items() if value is not None}
