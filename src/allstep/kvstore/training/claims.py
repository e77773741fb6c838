"""Claims: a party takes the next samples of the run from one counter in shared memory (D17).

A fast party takes more, each sample counts once, and the position of the run stays one integer.

    | mutex | position | limit | share | epoch | round | given | taker | table of open claims |

The table has room for `OPEN` claims of each party: those that it has taken and not pushed. A party
adds entries under the mutex, and clears its own without it, so only entries of lost parties can be
found there by others. These are given out again first, to the party that asks next.

**Kills.** A party that takes a claim writes its entry first and moves the counter then. `taker`
names the entry meanwhile: if the party is killed in between, the next holder of the mutex drops the
entry, unless the claim counts as taken already. An entry that was pushed completely is cleared by
the next holder as well (`Settle`), before it could be given out again.

With `lazy:K` a claim is a block of K steps, which `next` hands out one by one.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from allstep.errors import UserError
from allstep.kvstore.memory.bounded_wait import BoundedWait
from allstep.kvstore.memory.key_memory import aligned
from allstep.kvstore.memory.robust_mutex import MUTEX_BYTES
from allstep.kvstore.memory.slice_locks import Lock
from allstep.kvstore.training.push import Claim, steps_of

OPEN = 256
"""Claims that a party may have taken and not pushed."""

_POSITION, _LIMIT, _SHARE, _EPOCH, _ROUND, _GIVEN, _TAKER, _HOLDER = range(8)
_TABLE = 8
# Seconds of one attempt to lock; the limits are checked in between.
_TRY = 0.05


class Settle(Protocol):
    """What claims must know of the parties; implemented by `SharedModel`."""

    def newly_lost(self) -> set[int]:
        """Return parties that are lost, also those known before."""

    def pushed_last(self, rank: int) -> int | None:
        """Return the place of the claim that a lost party pushed completely; None if there is none.

        Marks an incomplete push in the order log.
        """


class Claims:
    """The claims of a run, seen from one party.

    memory: `nbytes(size)` bytes. lock: on the memory's mutex. capacity: claims of a round at most.
    steps: those of a claim, the K of `lazy:K`.
    """

    def __init__(
        self,
        memory: memoryview,
        lock: Lock,
        rank: int,
        size: int,
        steps: int,
        capacity: int,
        settle: Settle,
        begin_wait: Callable[[str], BoundedWait],
    ) -> None:
        self._numbers = memory[MUTEX_BYTES : self.nbytes(size)].cast("q")
        self._lock, self._threads = lock, threading.Lock()
        self._rank, self._size, self._pid = rank, size, os.getpid()
        self._steps, self._capacity = steps, capacity
        self._settle, self._begin_wait = settle, begin_wait
        # Steps of our last block that have not been handed out.
        self._left: list[Claim] = []
        # Where our open blocks are, by their start.
        self._places: dict[int, int] = {}
        self._settled: set[int] = set()

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes for `size` parties."""
        return aligned(MUTEX_BYTES + (_TABLE + size * OPEN * 2) * 8)

    # Rounds

    def begin_round(self, number: int, position: int, limit: int, share: int, epoch: int) -> None:
        """Let claims be taken from `position` to `limit`; the first party that calls it counts.

        number: that of the round, from 1. share: samples of a step. epoch: samples of an epoch.
        """
        with self._locked():
            numbers = self._numbers
            if numbers[_ROUND] < number:
                numbers[_POSITION], numbers[_LIMIT] = position, max(position, limit)
                numbers[_SHARE], numbers[_EPOCH], numbers[_GIVEN] = share, epoch, 0
                # Last: a party that was killed before it has begun nothing.
                numbers[_ROUND] = number

    def request_stop(self) -> int:
        """Let no more claims be taken in this round; return its end. Any party may call it."""
        with self._locked():
            self._numbers[_LIMIT] = self._numbers[_POSITION]
            return self._numbers[_LIMIT]

    @property
    def position(self) -> int:
        """The position up to which claims have been taken."""
        return self._numbers[_POSITION]

    @property
    def limit(self) -> int:
        """The end of this round."""
        return self._numbers[_LIMIT]

    @property
    def share(self) -> int:
        """The samples of a step."""
        return self._numbers[_SHARE]

    # Taking

    def next(self) -> Claim | None:
        """Take the next step; None at the end of the round. May be called ahead of the pushes."""
        if os.getpid() != self._pid:
            raise UserError(
                "claims.next() in a forked process: only the process of the party takes claims;"
                " pass their samples to loader workers"
            )
        with self._threads:
            if not self._left:
                self._left = self._next_block()
            return self._left.pop(0) if self._left else None

    def _next_block(self) -> list[Claim]:
        with self._locked():
            taken = self._take_again() or self._take_new()
            return [] if taken is None else steps_of(*taken, self._numbers[_SHARE])

    def _take_new(self) -> tuple[int, int] | None:
        """Take the next block from the counter."""
        numbers = self._numbers
        start = numbers[_POSITION]
        if start >= numbers[_LIMIT] or numbers[_GIVEN] >= self._capacity:
            return None
        epoch = numbers[_EPOCH]
        epoch_end = (start // epoch + 1) * epoch
        end = min(start + numbers[_SHARE] * self._steps, numbers[_LIMIT], epoch_end)
        place = self._free_place()
        numbers[_TAKER] = place
        self._write(place, start, end - start)
        numbers[_POSITION] = end
        numbers[_TAKER] = 0
        numbers[_GIVEN] += 1
        return start, end - start

    def _take_again(self) -> tuple[int, int] | None:
        """Take an open block of a lost party: the first one in the order of the run."""
        numbers, lost = self._numbers, self._settle_lost()
        found = [(numbers[at], at) for at in self._open(lost)]
        if not found:
            return None
        start, theirs = min(found)
        count, place = numbers[theirs + 1], self._free_place()
        numbers[_TAKER] = place
        self._write(place, start, count)
        numbers[theirs + 1] = 0
        numbers[_TAKER] = 0
        return start, count

    def _write(self, place: int, start: int, count: int) -> None:
        # The count last: an entry with the count 0 is free.
        self._numbers[place], self._numbers[place + 1] = start, count
        self._places[start] = place

    def _free_place(self) -> int:
        for place in self._entries(self._rank):
            if not self._numbers[place + 1]:
                return place
        raise UserError(
            f"claims.next(): this party has {OPEN} claims that it has not pushed; take fewer ahead"
        )

    def _entries(self, rank: int) -> range:
        first = _TABLE + rank * OPEN * 2
        return range(first, first + OPEN * 2, 2)

    def _open(self, ranks: set[int]) -> Iterator[int]:
        """Yield the entries of open claims of these parties."""
        for rank in sorted(ranks):
            for place in self._entries(rank):
                if self._numbers[place + 1]:
                    yield place

    # Pushing

    def block_of(self, start: int) -> tuple[int, int, int]:
        """Return start, count and place of our open block in which a step starts."""
        for first, place in self._places.items():
            if first <= start < first + self._numbers[place + 1]:
                return first, self._numbers[place + 1], place
        raise UserError(
            f"begin(claim): this party has no open claim from position {start}; each claim of"
            " claims.next() is used once"
        )

    def close(self, start: int) -> None:
        """Record that a block of ours is done."""
        self._numbers[self._places.pop(start) + 1] = 0

    def check_done(self) -> None:
        """Raise UserError if this party has claims that it has not pushed."""
        if self._left or self._places:
            start = min(self._places)
            raise UserError(
                f"synchronize(): this party has taken {len(self._places)} claims, from position"
                f" {start}, and not pushed them; push or skip each claim of claims.next() before"
            )

    # Lost parties

    def num_open(self) -> int:
        """Return how many claims lost parties have left open."""
        with self._locked():
            return sum(1 for _ in self._open(self._settle_lost()))

    def _settle_lost(self) -> set[int]:
        """Clear what lost parties have pushed completely; return these parties."""
        lost = self._settle.newly_lost()
        for rank in lost - self._settled:
            place = self._settle.pushed_last(rank)
            if place is not None:
                self._numbers[place + 1] = 0
            self._settled.add(rank)
        return lost

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire():
            waiting = self._begin_wait("taking a claim")
            while not self._lock.acquire(_TRY):
                holder = self._numbers[_HOLDER]
                waiting.check_limits(f"rank {holder}, which takes a claim", holder)
        try:
            self._numbers[_HOLDER] = self._rank
            self._repair()
            yield
        finally:
            self._lock.release()

    def _repair(self) -> None:
        """Finish what a party was doing that was killed while it took a claim."""
        numbers = self._numbers
        place = numbers[_TAKER]
        if place and numbers[place + 1]:
            start = numbers[place]
            others = (at for at in self._open(set(range(self._size))) if at != place)
            if start >= numbers[_POSITION] or any(numbers[at] == start for at in others):
                numbers[place + 1] = 0
        numbers[_TAKER] = 0
