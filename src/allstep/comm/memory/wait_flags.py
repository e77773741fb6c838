"""Waiting for other ranks of the host, through flags in shared memory.

Each rank has a line of its own in the control memory, which only that rank writes:

    | count | mark 0 | mark 1 | asleep | failed | ...   8 bytes each, one line of 128 bytes per rank

`count` only grows. A rank that has written its data adds one to it (`publish`); the others wait
until it has reached their own count (`wait`). Every barrier consists of these two steps. A mark
identifies the operation that the count belongs to, so ranks that call different operations detect
it at once.

Data and flag are separated by a memory fence (`allstep.process.futex`).

How a rank waits: it spins if every rank has a core (a hand-over takes 1 us), then yields the core
with `sched_yield`, then sleeps in the kernel on the count that it waits for (`futex`), which lets
other threads of this process run. Each sleep is short, so a lost wake-up causes a delay and never a
hang. After each sleep the rank checks that the process of the missing rank is alive, and asks the
guard of the group for a reason to stop. A rank that knows of a failure sets its `failed` flag; the
others then read what it has posted.

Whether the missing process is alive: during the first 16 ms its pidfd is checked, which costs
almost nothing. After that the flags of its tasks are read after each sleep (`liveness`), so a rank
with gigabytes of memory is detected as lost before the kernel has freed them.
"""

import os
from collections.abc import Sequence

from allstep.comm.health.failure import Operation
from allstep.comm.health.guard import Guard
from allstep.errors import CommError
from allstep.process.futex import address_of, new_fence, sleep_until_changed, wake
from allstep.process.liveness import Life, life_of

# Numbers of 8 bytes per rank: 128 bytes, so that no two ranks share a cache line.
LINE = 16
_COUNT, _MARK, _ASLEEP, _FAILED, _WANTS_NETWORK = 0, 1, 3, 4, 5
# A few us; a rank that has not arrived by then may be waiting for our core.
_SPINS = 50
_YIELDS = 50
_SHORT_NAP, _LONG_NAP = 0.002, 0.05
# Sleeps take 2, 3, 4.5, 6.75, 10.1 ms and so on, up to 50. From this length on, the flags of the
# missing rank's tasks are read after each sleep.
_FLAGS_NAP = 0.01


def control_bytes(size: int) -> int:
    """Return the bytes of memory for the flags of `size` ranks."""
    return size * LINE * 8


class Flags:
    """The counts and marks of all ranks of a host, seen from one of them.

    `pids` are the processes of the ranks. `spins` is how often to check a count before yielding the
    core; 0 when there are fewer cores than ranks. `guard` is the group's guard, to which the ranks
    of this host have the numbers `ranks`.
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
        """Make all that this rank has written visible to the others: add one to the count."""
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
        """Wait until every rank has reached our count. `text`: the operation, for errors."""
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
        """Return the mark of each rank for the count that was just waited for."""
        at = _MARK + (self.count & 1)
        return [self.numbers[other * LINE + at] for other in range(self.size)]

    def has_other_mark(self, mark: int) -> bool:
        """Return whether some rank has a mark other than `mark`."""
        at = _MARK + (self.count & 1)
        numbers = self.numbers
        # Three times as fast as any().
        for other in self._others:  # noqa: SIM110
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
        """Raise if the missing rank's process has ended, or if the guard knows a failure.

        `closely`: also read the flags of its tasks, which show that a process is ending.
        """
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
        """Set our failed flag, so that the others read what we have posted."""
        self._fence()
        self.numbers[self._mine + _FAILED] = 1

    def failed_rank(self) -> int | None:
        """Return a rank of this host that has set its failed flag, if any."""
        return next((line // LINE for line in self._others if self.numbers[line + _FAILED]), None)

    def ask_for_network(self) -> None:
        """Ask the other ranks to connect over the network."""
        self.numbers[self._mine + _WANTS_NETWORK] = 1

    def is_network_wanted(self) -> bool:
        """Return whether another rank of this host has asked for that."""
        return any(self.numbers[line + _WANTS_NETWORK] for line in self._others)

    def _sleep(self, other: int, seconds: float) -> None:
        """Sleep until the count of `other` changes, at most `seconds`.

        The kernel compares the count and falls asleep in one step.
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
    """Return how often to spin: 0 if there are fewer cores than ranks.

    Spinning helps if the missing rank has a core of its own; otherwise it takes that core away.
    """
    return _SPINS if num_cores >= num_ranks else 0
