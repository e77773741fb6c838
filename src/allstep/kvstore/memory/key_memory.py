"""A key in memory: its value in slices, their locks and versions, and a line for each worker.

    | line of worker 0 | ... | line of slice 0 | ... | value | contribution of worker 0 | ...

    line of a worker    pushes made, version read (see `modes`); only that worker writes it
    line of a slice     mutex | version, torn updates, holder, whether the optimizer has state
    contribution        a worker's gradient of the round, in stores that sum (mode sync), and the
                        numbers of its rows if it has only some

**Versions.** An update adds one to a slice's version when it begins and one when it ends, so the
version is odd in between and `version // 2` updates have been applied. A worker that is killed in
the middle leaves it odd. Each element is then updated or not, never garbage: the next holder of the
lock makes the version even, counts a torn update, and continues.

**One order.** A worker that visits all slices of a key locks the next slice before it unlocks the
last one (`in_turn`). So no worker overtakes another one, two pushes are applied in the same order
on all slices, and a pull returns a value between two updates. Only a kill in the middle of a push
makes slices differ in their number of updates.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from allstep.kvstore.memory.bounded_wait import BoundedWait
from allstep.kvstore.memory.robust_mutex import MUTEX_BYTES
from allstep.kvstore.memory.slice_locks import Lock
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.slices import Span, cut
from allstep.process.futex import address_of

_ALIGNED = 64
WORKER_LINE, SLICE_LINE = 64, 128
"""Bytes of the line of a worker and of a slice."""

_VERSION, _TORN, _HOLDER, _HAS_STATE = 0, 1, 2, 3
# Seconds of one attempt to lock; the limits are checked in between.
_TRY = 0.05


class Place(NamedTuple):
    """Where the parts of a key begin in its memory, in bytes."""

    slices: int
    value: int
    contributions: int
    end: int


@dataclass(frozen=True)
class KeyShape:
    """Key, shape and type of a value, as all workers must pass them to `init`.

    parts: its slices, if servers store them; default: ranges of 1 MB.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Span, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """The bytes of one copy, with padding."""
        return aligned(self.numel * self.dtype.itemsize)

    @property
    def spans(self) -> list[Span]:
        """The slices of the value."""
        return list(self.parts) or cut(self.numel, self.dtype.itemsize, width=self.width)

    @property
    def width(self) -> int:
        """The elements of a row of a matrix, or of a tensor with more dimensions; else 1."""
        return torch.Size(self.shape[1:]).numel()

    @property
    def num_rows(self) -> int:
        """The number of rows of which a push may have some; 0 if the value is no matrix."""
        return self.shape[0] if len(self.shape) > 1 else 0

    @property
    def contribution_nbytes(self) -> int:
        """The bytes of a worker's contribution: a gradient, and the numbers of its rows."""
        return self.nbytes + aligned(8 * self.num_rows)

    def place(self, num_workers: int, num_contributions: int) -> Place:
        """Return where the parts begin for a number of workers."""
        slices = aligned(num_workers * WORKER_LINE)
        value = slices + len(self.spans) * SLICE_LINE
        contributions = value + self.nbytes
        end = contributions + num_contributions * self.contribution_nbytes
        return Place(slices, value, contributions, end)

    def __str__(self) -> str:
        return f"{short(self.dtype)} {list(self.shape)}"


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole cache lines."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def short(dtype: torch.dtype) -> str:
    """Return the name of a type without "torch."."""
    return str(dtype).removeprefix("torch.")


def tensor_in(memory: memoryview, at: int, dtype: torch.dtype, numel: int) -> Tensor:
    """Return a flat tensor in `memory`, from byte `at` on."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=at)


class Caller(NamedTuple):
    """The worker that locks slices: its rank on this host, how it waits (None: without limits)."""

    rank: int
    begin_wait: Callable[[str], BoundedWait | None]


class Slice:
    """A part of a key with its own lock and version.

    index: its number in the key. start, end: its elements. numbers: its part of the line.
    """

    __slots__ = ("_key", "_lock", "end", "index", "numbers", "start")

    def __init__(self, key: Key, index: int, span: Span, lock: Lock, numbers: memoryview) -> None:
        self._key, self.index = key, index
        self.start, self.end = span
        self._lock, self.numbers = lock, numbers

    @property
    def num_updates(self) -> int:
        """The number of updates that have been applied, or torn."""
        return self.numbers[_VERSION] // 2

    @property
    def num_torn(self) -> int:
        """The number of updates whose worker was killed in the middle."""
        return self.numbers[_TORN]

    @property
    def has_state(self) -> bool:
        """Whether the optimizer's state of this slice is in shared memory."""
        return bool(self.numbers[_HAS_STATE])

    @has_state.setter
    def has_state(self, value: bool) -> None:
        self.numbers[_HAS_STATE] = value

    def acquire(self, caller: Caller, call: str) -> None:
        """Lock it; count an update that its last holder left unfinished. `call`: for reports."""
        if not self._lock.acquire():
            self._acquire_slowly(caller.begin_wait(self._text(call)))
        numbers = self.numbers
        if numbers[_VERSION] & 1:
            self._repair(numbers[_HOLDER])
        numbers[_HOLDER] = caller.rank

    def _repair(self, holder: int) -> None:
        """Count an update that its last holder left unfinished."""
        self.numbers[_TORN] += 1
        self.numbers[_VERSION] += 1

    def _text(self, call: str) -> str:
        """Return the description of a call, for reports."""
        return f"{call} of key {self._key!r}"

    def _acquire_slowly(self, waiting: BoundedWait | None) -> None:
        while not self._lock.acquire(_TRY):
            if waiting is not None:
                holder = self.numbers[_HOLDER]
                text = f"rank {waiting.name(holder)}, which holds slice {self.index}"
                waiting.check_limits(text, holder)

    def whole(self, numel: int) -> "Slice":
        """Return a slice of all `numel` elements with the lock and the numbers of this one."""
        return Slice(self._key, 0, (0, numel), self._lock, self.numbers)

    def of(self, flat: Tensor) -> Tensor:
        """Return its part of a flat tensor of the size of the key."""
        # Cutting takes as long as copying 4 KB.
        return flat if self.end - self.start == flat.numel() else flat[self.start : self.end]

    def release(self) -> None:
        """Unlock it."""
        self._lock.release()

    def begin(self) -> None:
        """Make the version odd: an update begins."""
        self.numbers[_VERSION] += 1

    def finish(self) -> None:
        """Make the version even: the update is complete."""
        self.numbers[_VERSION] += 1


class StoredKey:
    """A key of a store, as one process sees it.

    form: what it is. memory: `form.place(...).end` bytes. locks: makes the lock of each slice from
    its address. num_contributions: how many workers have a contribution here.
    """

    def __init__(
        self,
        form: KeyShape,
        memory: memoryview,
        locks: Callable[[int], Lock],
        num_workers: int,
        num_contributions: int = 0,
    ) -> None:
        self.form, self.key, self.shape, self.dtype = form, form.key, form.shape, form.dtype
        self._place = place = form.place(num_workers, num_contributions)
        self._memory, self._base = memory, address_of(memory)
        self.workers = memory[: num_workers * WORKER_LINE].cast("q")
        numel = form.numel
        self.flat = tensor_in(memory, place.value, form.dtype, numel)
        starts = [
            place.contributions + worker * form.contribution_nbytes
            for worker in range(num_contributions)
        ]
        self.contributions = [tensor_in(memory, at, form.dtype, numel) for at in starts]
        self.contributed_rows = [
            tensor_in(memory, at + form.nbytes, torch.int64, form.num_rows) for at in starts
        ]
        self._cut = [self._slice(index, span, locks) for index, span in enumerate(form.spans)]
        self.slices: Sequence[Slice] = self._cut
        self.batches: Sequence[Sequence[Slice]] = ()
        """The slices in batches of rows, once `row_batches` has made them."""

    def _slice(self, index: int, span: Span, locks: Callable[[int], Lock]) -> Slice:
        at = self._place.slices + index * SLICE_LINE
        numbers = self._memory[at + MUTEX_BYTES : at + SLICE_LINE].cast("q")
        return Slice(self.key, index, span, locks(self._base + at), numbers)

    def use_whole(self, is_whole: bool) -> None:
        """Treat the value as one slice, for optimizers that need whole layers, or as several.

        All workers call this together, while none of them uses the key.
        """
        self.slices = [self._cut[0].whole(self.form.numel)] if is_whole else self._cut
        self.batches = ()

    @property
    def num_torn(self) -> int:
        """The number of torn updates, over all slices."""
        return sum(each.num_torn for each in self._cut)

    def number(self, worker: int, field: int) -> int:
        """Return where a number of a worker's line is in `workers`."""
        return worker * (WORKER_LINE // 8) + field

    def address(self, number: int) -> int:
        """Return the address of a number in `workers`, to wait for its change."""
        return self._base + number * 8


class Admission(Protocol):
    """Decides whether a push may begin, under the lock of the first slice."""

    def blocker(self, first: Slice) -> int | None:
        """Return a worker to wait for, or None if the push may begin."""

    def wait(self, peer: int) -> None:
        """Wait for that worker, without a lock."""


class Cut(Protocol):
    """A value in slices, such as a key."""

    slices: Sequence[Slice]


def in_turn(
    stored: Cut, caller: Caller, call: str, admission: Admission | None = None
) -> Generator[Slice]:
    """Yield each slice of a value, locked; lock the next one before the last one is unlocked.

    call: what the caller does, for reports. admission: may delay the beginning.
    """
    held: Slice | None = None
    try:
        for each in stored.slices:
            each.acquire(caller, call)
            if held is not None:
                held.release()
            held = each
            while admission and not each.index and (peer := admission.blocker(each)) is not None:
                each.release()
                held = None
                admission.wait(peer)
                each.acquire(caller, call)
                held = each
            yield each
    finally:
        if held is not None:
            held.release()


@contextmanager
def all_locked(stored: StoredKey, caller: Caller, call: str) -> Iterator[None]:
    """Hold the locks of all slices of a key. `call`: what the caller does, for reports."""
    with ExitStack() as held:
        for each in stored.slices:
            each.acquire(caller, call)
            held.callback(each.release)
        yield
