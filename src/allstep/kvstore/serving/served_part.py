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
from allstep.kvstore.serving.held_values import HeldValues
from allstep.kvstore.updates.key_optimizer import (
    KeyOptimizer,
    StatePlan,
    apply_slice,
    plain_sum,
)
from allstep.kvstore.updates.optimizer_class import OptimizerClass

# Seconds between two checks of a wait for another party.
_LOOK_SECONDS = 0.5


class ServedPart:
    """A part of the value of a key.

    form: key, shape and type. num_hosts: that contribute to a round. bound: of the ages in mode
    stale; None in the others.
    """

    def __init__(self, form: KeyShape, num_hosts: int, bound: int | None) -> None:
        self.form = form
        memory = memoryview(bytearray(form.place(1, 0).end))
        self.stored = StoredKey(form, memory, lambda _: ThreadLock(), 1)
        self.optimizer: KeyOptimizer | None = None
        self.changed = Condition()
        self._all = self.stored.slices[0].whole(form.numel)
        self._num_hosts, self._bound = num_hosts, bound
        self._contributions: list[Tensor | None] = [None] * num_hosts
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

    def contribute(self, host: int) -> None:
        """Count the contribution of a host, which is in its room; the last one updates."""
        with self.changed:
            if host in self._arrived:
                raise CommError(
                    f"push of key {self.form.key!r}: host {host} contributes to a round twice"
                )
            self._arrived.add(host)
            if len(self._arrived) == self._num_hosts:
                self._arrived.clear()
                self._update(self._sum())
                self.changed.notify_all()

    def _sum(self) -> Tensor:
        dtype = self.form.dtype if self.optimizer is None else self.optimizer.plan.dtype
        first, *others = [part for part in self._contributions if part is not None]
        if not others:
            return first
        total = first.to(dtype, copy=True)
        for part in others:
            total.add_(part)
        return total

    def wait_for_round(self, number: int, check: Callable[[], None]) -> None:
        """Wait until round `number` is complete; `check` raises if it cannot be."""
        with self.changed:
            while self.version < number:
                check()
                self.changed.wait(_LOOK_SECONDS)

    # Async and stale

    def push(self, party: int, gradient: Tensor, idle: Callable[[], set[int]]) -> None:
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

    def _update(self, gradient: Tensor) -> None:
        if self.optimizer is None:
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
