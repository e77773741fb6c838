"""Waiting for other ranks of the host, through flags in shared memory.

Each rank has a line of its own in the control memory, which only it writes::

    | count | mark 0 | mark 1 | asleep | alarm | ...   eight bytes each, one cache line of 128 bytes per rank

`count` only grows. A rank that has written its data adds one to it (`publish`); the others wait
until it has reached their own count (`wait`). That is all there is: every exchange is "I am this
far" and "is everybody this far?". A mark says what the count stands for (which operation, on what),
so that ranks that do different things find out at once.

Data and flag are separated by a memory fence (`allstep.process.futex`).

How to wait: spin when every rank has a core (a hand-over takes 1 us), then give the core away with
`sched_yield`, then sleep in the kernel on the count that is missing (`futex`), which lets other
threads of this process run. Each sleep is short, so a lost wake-up is a delay and never a hang;
after each sleep we look whether the missing rank still lives, and ask the guard of the group
whether it makes sense to wait on. A rank that knows of a failure sounds the alarm: then the others
look what it has posted.

Whether the missing rank lives: during the first 16 ms its pidfd is enough, which costs next to
nothing; after that the flags of its tasks are read with each sleep (`liveness`), so that a rank
with gigabytes of memory is missed before the kernel has freed them.
"""

import os
from collections.abc import Sequence

from allstep.comm.health.failure import Operation
from allstep.comm.health.guard import Guard
from allstep.errors import CommError
from allstep.process.futex import address_of, new_fence, sleep_until_changed, wake
from allstep.process.liveness import Life, life_of

LINE = 16  # numbers of eight bytes per rank: 128 bytes, so that no two ranks share a cache line
_COUNT, _MARK, _ASLEEP, _FAILED = 0, 1, 3, 4
_SPINS = 50  # a few us; who has not come by then may be waiting for our core
_YIELDS = 50
_SHORT_NAP, _LONG_NAP = 0.002, 0.05
# Naps are 2, 3, 4.5, 6.75, 10.1 ms and so on, up to 50. From this length on the flags of the
# missing rank's tasks are read after each.
_FLAGS_NAP = 0.01


def control_bytes(size: int) -> int:
    """Memory that the flags of `size` ranks need."""
    return size * LINE * 8


class Flags:
    """The counts and marks of all ranks, seen from one of them.

    pids: the processes of the ranks. spins: how often to look before giving the core away; 0 when
    there are fewer cores than ranks. guard: of the group, in which the ranks of this host have the
    numbers `ranks`.
    """

    def __init__(
        self,
        control: memoryview,
        rank: int,
        pids: Sequence[int],
        spins: int,
        guard: Guard,
        ranks: Sequence[int],
    ) -> None:
        self.guard, self.ranks = guard, ranks
        self.numbers = control.cast("q")
        self.rank = rank
        self.size = len(pids)
        self.count = 0
        self._mine = rank * LINE
        self._others = [other * LINE for other in range(self.size) if other != rank]
        self._spins = spins
        self._fence = new_fence()
        base = address_of(control)
        self._count_addresses = [base + other * LINE * 8 for other in range(self.size)]
        self._lives = {
            other * LINE: _watched(pid) for other, pid in enumerate(pids) if other != rank
        }

    def publish(self, mark: int) -> None:
        """All that we have written so far is for the others to read: we are one further."""
        numbers, mine, fence = self.numbers, self._mine, self._fence
        self.count = count = self.count + 1
        numbers[mine + _MARK + (count & 1)] = mark
        fence()
        numbers[mine] = count
        fence()
        for other in self._others:
            if numbers[other + _ASLEEP]:
                self._wake()
                break

    def wait(self, text: str) -> None:
        """Until every rank is as far as we are. said: what for."""
        numbers, count = self.numbers, self.count
        for other in self._others:
            if numbers[other] < count:
                for _ in range(self._spins):
                    if numbers[other] >= count:
                        break
                else:
                    self._wait_long(other, text)
        self._fence()

    def marks(self) -> list[int]:
        """What each rank said with the count that we just waited for."""
        at = _MARK + (self.count & 1)
        return [self.numbers[other * LINE + at] for other in range(self.size)]

    def has_other_mark(self, mark: int) -> bool:
        """Whether some rank gave another mark than ours."""
        at = _MARK + (self.count & 1)
        numbers = self.numbers
        for other in self._others:  # noqa: SIM110  # three times as fast as any()
            if numbers[other + at] != mark:
                return True
        return False

    def _wait_long(self, other: int, text: str) -> None:
        numbers, count = self.numbers, self.count
        for _ in range(_YIELDS):
            if numbers[other] >= count:
                return
            os.sched_yield()
        operation = Operation(text, self.guard.begun)
        nap = _SHORT_NAP
        numbers[self._mine + _ASLEEP] = 1
        self._fence()
        try:
            while numbers[other] < count:
                self._sleep(other, nap)
                self._check_on(other, operation, nap >= _FLAGS_NAP)
                nap = min(_LONG_NAP, nap * 1.5)
        finally:
            numbers[self._mine + _ASLEEP] = 0
            self.guard.end(operation)

    def _check_on(self, other: int, operation: Operation, closely: bool) -> None:
        """Is the missing rank's process still there, and does the guard know a reason to stop?
        closely: read its tasks' flags."""
        if self.numbers[other] >= self.count:
            return
        life = self._lives[other]
        if (life.is_ending() if closely else life.has_ended()) and self.numbers[other] < self.count:
            self.guard.lose(self.ranks[other // LINE])
        if operation.seconds > self.guard.young:
            self.guard.begin(operation)
        else:
            self.guard.check(operation)

    def set_failed(self) -> None:
        """The others shall look what we have posted."""
        self._fence()
        self.numbers[self._mine + _FAILED] = 1

    def failed_rank(self) -> int | None:
        """A rank that has sounded the alarm."""
        return next((line // LINE for line in self._others if self.numbers[line + _FAILED]), None)

    def _sleep(self, other: int, seconds: float) -> None:
        """Until the count of `other` changes, at most so long.

        The comparison and the falling asleep are one step of the kernel.
        """
        seen = self.numbers[other]
        if seen >= self.count:
            return
        sleep_until_changed(self._count_addresses[other // LINE], seen, seconds)

    def _wake(self) -> None:
        wake(self._count_addresses[self.rank], self.size)


def _watched(pid: int) -> Life:
    try:
        return life_of(pid)
    except OSError as error:
        raise CommError(f"the process {pid} of another rank cannot be watched: {error}") from error


def spins_for(num_ranks: int, num_cores: int) -> int:
    """Spinning helps when the rank that is waited for has a core to run on; otherwise it takes that
    core away from it."""
    return _SPINS if num_cores >= num_ranks else 0
