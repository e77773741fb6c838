"""One part of a key on its server: the value, its optimizer, and what each mode adds.

======  ==========================================================================================
mode    a push
======  ==========================================================================================
sync    a host contributes its sum to the next round. When all hosts have contributed, the sums are
        added in order of hosts and make one update, whichever came first. A pull names its round
        and waits for it
async   is an update
stale   is an update, once it makes no other party's gradient older than the bound
        (`rules.gradient_age`). The version that a party reads is kept from its pull to its push
======  ==========================================================================================

Threads of several links use a part; its condition is its lock.
"""

from collections.abc import Callable, Collection
from threading import Condition

import torch
from torch import Tensor

from allstep.compression import Codec
from allstep.errors import CommError, UserError
from allstep.kvstore.memory.key_memory import KeyShape, StoredKey
from allstep.kvstore.memory.slice_locks import ThreadLock
from allstep.kvstore.rules.gradient_age import NONE, blocker, in_time
from allstep.kvstore.rules.row_span import RowSpan
from allstep.kvstore.serving.held_values import HeldValues
from allstep.kvstore.updates.key_optimizer import (
    KeyOptimizer,
    StatePlan,
    apply_slice,
    plain_sum,
)
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.row_updates import Rows, apply_rows, dense_slice, sum_of_rows

# Seconds between two checks of a wait for another party.
_LOOK_SECONDS = 0.5


class ServedPart:
    """A part of the value of a key.

    form: key, shape and type. num_hosts: that contribute to a round. bound: of the ages in mode
    stale; None in the others. span: which elements of the key it has; default: all.
    """

    def __init__(
        self, form: KeyShape, num_hosts: int, bound: int | None, span: RowSpan | None = None
    ) -> None:
        self.form = form
        self.span = span or RowSpan(0, form.numel, max(1, form.width))
        memory = memoryview(bytearray(form.place(1, 0).end))
        self.stored = StoredKey(form, memory, lambda _: ThreadLock(), 1)
        self.optimizer: KeyOptimizer | None = None
        self.changed = Condition()
        self._all = self.stored.slices[0].whole(form.numel)
        self._num_hosts, self._bound = num_hosts, bound
        self._contributions: list[Tensor | None] = [None] * num_hosts
        # Of hosts that contribute rows to this round.
        self._rows: dict[int, Rows] = {}
        self._arrived: set[int] = set()
        self._reads: dict[int, int] = {}
        self._held: HeldValues | None = None
        # The oldest gradient that was applied, in updates of other parties (mode stale).
        self.max_age = 0
        self._is_common = False

    @property
    def version(self) -> int:
        """The number of updates so far."""
        return self._all.num_updates

    def set_value(self, value: Tensor, parties: int) -> None:
        """Set the first value, which all parties have read."""
        with self.changed:
            self.stored.flat.copy_(value)
            self._reads = dict.fromkeys(range(parties), 0)
            self._hold_for_all()

    # Compressed pulls

    def encode_pulls(self, codec: Codec | None, *, is_common: bool) -> None:
        """Encode pulls from now on. is_common: all receivers hold the same value (mode sync)."""
        with self.changed:
            self._held = None
            if codec is not None:
                self._held = HeldValues(codec, self.form.numel, is_common=is_common)
            self._is_common = is_common
            self._hold_for_all()

    def _hold_for_all(self) -> None:
        if self._held is not None and self._is_common:
            self._held.hold(0, self.stored.flat)

    def encoded(self, party: int, to: Tensor) -> tuple[int, int]:
        """Copy what a party must receive to hold the value; return version and meaning."""
        with self.changed:
            if self._held is None:
                raise CommError(f"pull of key {self.form.key!r}: this store compresses no pulls")
            self._reads[party] = self.version
            is_sum = self.optimizer is None
            found, meaning = self._held.encoded(
                party, self.stored.flat, self.version, is_sum=is_sum
            )
            to.copy_(found)
            return self.version, meaning

    def leave(self, party: int) -> None:
        """Drop what is kept for a party."""
        with self.changed:
            if self._held is not None and not self._is_common:
                self._held.forget(party)

    # Optimizer

    def plan(self, chosen: OptimizerClass) -> StatePlan:
        """Return the state that an optimizer keeps for this part."""
        return StatePlan(chosen, self.form)

    def attach(self, chosen: OptimizerClass) -> None:
        """Update with this optimizer from now on, without state."""
        plan = self.plan(chosen)
        self._all.has_state = False
        memory = memoryview(bytearray(max(1, plan.nbytes)))
        self.optimizer = KeyOptimizer(self.stored, chosen, plan, memory)
        self.optimizer.copy_to_master()

    def mark_state(self) -> None:
        """Note that the state has been set from outside."""
        self._all.has_state = True

    # Sync

    def room(self, host: int) -> Tensor:
        """Return the memory for the contribution of a host; only its own link writes it."""
        found = self._contributions[host]
        if found is None:
            found = self._contributions[host] = torch.empty(self.form.numel, dtype=self.form.dtype)
        return found

    def wait_for_turn(self, host: int, check: Callable[[], None]) -> None:
        """Wait until the last contribution of a host is used; `check` raises if it cannot be."""
        with self.changed:
            while host in self._arrived:
                check()
                self.changed.wait(_LOOK_SECONDS)

    def contribute(self, host: int, rows: Rows | None = None) -> None:
        """Count the contribution of a host: rows, or what is in its room; the last one updates."""
        with self.changed:
            if host in self._arrived:
                raise CommError(
                    f"push of key {self.form.key!r}: host {host} contributes to a round twice"
                )
            self._arrived.add(host)
            if rows is not None:
                self._rows[host] = rows
            if len(self._arrived) == self._num_hosts:
                self._arrived.clear()
                self._update(self._sum())
                self._rows.clear()
                self.changed.notify_all()

    def _sum(self) -> Tensor | Rows:
        """Return the sum of the round, in order of hosts: of rows, if no host has more."""
        if len(self._rows) == self._num_hosts:
            rows = [self._rows[host] for host in range(self._num_hosts)]
            return sum_of_rows(rows, 0, self.form.num_rows)
        dtype = self.form.dtype if self.optimizer is None else self.optimizer.plan.dtype
        first, *others = [self._dense(host) for host in range(self._num_hosts)]
        if not others:
            return first
        total = first.to(dtype, copy=True)
        for part in others:
            total.add_(part)
        return total

    def _dense(self, host: int) -> Tensor:
        if (rows := self._rows.get(host)) is not None:
            return dense_slice(rows, self.form.width, 0, self.form.numel)
        found = self._contributions[host]
        assert found is not None
        return found

    def wait_for_round(self, number: int, check: Callable[[], None]) -> None:
        """Wait until round `number` is complete; `check` raises if it cannot be."""
        with self.changed:
            while self.version < number:
                check()
                self.changed.wait(_LOOK_SECONDS)

    # Async and stale

    def push(self, party: int, gradient: Tensor | Rows, idle: Callable[[], set[int]]) -> None:
        """Apply a gradient, in mode stale once the bound allows it.

        idle: the parties that push nothing: lost, or in a barrier.
        """
        with self.changed:
            if self.optimizer is None:
                raise UserError(
                    f"push of key {self.form.key!r}: the store updates at each push and has no"
                    " optimizer yet; call set_optimizer first"
                )
            if self._bound is not None:
                self._wait_for_older(party, idle)
                if (read := self._reads.get(party, NONE)) != NONE:
                    self.max_age = max(self.max_age, self.version - read)
                # Until the next pull it computes no gradient.
                self._reads[party] = NONE
            self._update(gradient)
            self.changed.notify_all()

    def _wait_for_older(self, party: int, idle: Callable[[], set[int]]) -> None:
        assert self._bound is not None
        while True:
            out = idle()
            others = {
                p: read
                for p, read in self._reads.items()
                if p != party and read != NONE and p not in out
            }
            if blocker(self.version, others, self._bound) is None:
                return
            self.changed.wait(_LOOK_SECONDS)

    def _update(self, gradient: Tensor | Rows) -> None:
        if isinstance(gradient, Rows):
            apply_rows(self.stored, self.optimizer, [self._all], gradient)
        elif self.optimizer is None:
            self._all.begin()
            plain_sum(self.stored, self._all, gradient)
            self._all.finish()
        else:
            apply_slice(self.optimizer, self._all, gradient)

    def copy(self, party: int, to: Tensor, *, is_held: bool = False) -> int:
        """Copy the value between two updates; return its version.

        is_held: the party's next pulls are of differences from this value.
        """
        with self.changed:
            self._reads[party] = self.version
            to.copy_(self.stored.flat)
            if is_held and self._held is not None:
                self._held.hold(party, to)
            return self.version

    # Rows

    def rows_in(self, payload: Tensor, num_rows: int) -> Rows:
        """Return the rows of a message as rows of this part. payload: numbers and elements."""
        numbers = payload[: 8 * num_rows].view(torch.int64)
        self._check_rows(numbers, num_rows)
        start, end = self.span.cut(numbers)
        nbytes = 8 * num_rows + (end - start) * self.form.dtype.itemsize
        if payload.numel() != nbytes:
            raise CommError(
                f"push of key {self.form.key!r}: {num_rows} rows with {payload.numel()} bytes,"
                f" expected {nbytes}"
            )
        places = self._places(numbers)
        values = payload[8 * num_rows :].view(self.form.dtype)
        return Rows(places, values.view(places.numel(), self.form.width))

    def _check_rows(self, numbers: Tensor, num_rows: int) -> None:
        """Raise CommError if these are no rows that have elements here, in increasing order."""
        is_rising = bool((numbers[1:] > numbers[:-1]).all())
        if (
            numbers.numel() != num_rows
            or not is_rising
            or self.span.within(numbers)
            != (
                0,
                num_rows,
            )
        ):
            raise CommError(
                f"key {self.form.key!r}: found rows that part {self.span} does not have"
            )

    def _places(self, numbers: Tensor) -> Tensor:
        """Return rows of the key as rows of this part; single elements if it has cut rows."""
        if self.span.is_aligned:
            return numbers - self.span.start // self.span.width
        return self.span.places(numbers)

    def copy_rows(self, party: int, numbers: Tensor) -> tuple[Tensor, int]:
        """Return the elements of rows between two updates, and the version."""
        self._check_rows(numbers, numbers.numel())
        width = self.span.width if self.span.is_aligned else 1
        with self.changed:
            self._reads[party] = self.version
            table = self.stored.flat.view(-1, width)
            return table.index_select(0, self._places(numbers)).view(-1), self.version

    def keep_read(self, party: int, living: Collection[int]) -> bool:
        """Return whether a party may still push the gradient of its last pull; else forget it.

        living: all parties that still exist, which are in a barrier. All of them find the same
        gradients too old, since those are not counted in `in_time`.
        """
        assert self._bound is not None
        with self.changed:
            reads = {other: read for other, read in self._reads.items() if other in living}
            is_late = reads.get(party, NONE) != NONE and party not in in_time(
                self.version, reads, self._bound
            )
            if is_late:
                self._reads[party] = NONE
            return not is_late
