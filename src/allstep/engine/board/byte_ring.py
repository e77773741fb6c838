"""Streams of bytes through shared memory, and the bell that tells a process that something has
come.

**Ring.** One writer, one or several readers. The writer counts the bytes that it has written, each
reader those that it has read; both counts only grow, and byte n lies at n modulo the size of the
ring. What does not fit stays with the writer, who goes on when the readers have made room, so a
message may be larger than the ring. In the stream, each message follows its length.

**Bell.** Every process has a word that others change after they have written something for it.
Changing it is enough for one that is looking; one that sleeps in the kernel on that word is woken,
too. Two may be asleep there, of which only one must be woken: a caller who waits for a result and
drives the engine, or the engine's own thread, when no caller does. Each value that is ever written
to a bell is different from the one before, so whoever looks, finds nothing, and falls asleep on the
value that he saw before he looked misses nothing.

Between data and counts stands a memory fence (`allstep.process.futex`).
"""

from collections.abc import Sequence

from allstep.process.futex import new_fence, sleep_until_changed, wake
from allstep.wire.frames import LENGTH

LINE = 16  # numbers of eight bytes per rank: 128 bytes, so that no two ranks share a cache line
BELL, CALLER, THREAD, WRITTEN, READ, LOG_READ, NEEDS_ROOM, CLOSED = range(8)  # of each rank
AWAY, LOOKING, ASLEEP = 0, 1, 2  # what a caller does; the thread is AWAY or ASLEEP

_THREAD_BIT, _CALLER_BIT = 1, 2


class Frames:
    """Messages out of a stream that comes in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete with this piece."""
        if self._rest:
            data = self._rest + data
        at, found = 0, []
        while at + 4 <= len(data):
            end = at + 4 + LENGTH.unpack_from(data, at)[0]
            if end > len(data):
                break
            found.append(data[at + 4 : end])
            at = end
        self._rest = data[at:]
        return found


class RingWriter:
    """The writing end. written, reads: where the counts are in `numbers`."""

    def __init__(
        self, ring: memoryview, numbers: memoryview, written: int, reads: Sequence[int]
    ) -> None:
        self._ring, self._numbers = ring, numbers
        self._written, self._reads = written, reads
        self._count = 0
        self._fence = new_fence()
        self.unsent = b""

    def write(self, frame: bytes) -> bool:
        """Put a message into the stream; whether the readers see any of it now."""
        self.unsent = self.unsent + frame if self.unsent else frame
        return self.flush()

    @property
    def room(self) -> int:
        numbers = self._numbers
        return len(self._ring) - self._count + min(numbers[at] for at in self._reads)

    def flush(self) -> bool:
        """Write what there is room for; whether that was anything."""
        if not self.unsent:
            return False
        room, unsent = self.room, self.unsent
        if room <= 0:
            return False
        now, self.unsent = unsent[:room], unsent[room:]
        self._fence()
        at, size = self._count % len(self._ring), len(self._ring)
        front = now[: size - at]
        self._ring[at : at + len(front)] = front
        if len(front) < len(now):
            self._ring[: len(now) - len(front)] = now[len(front) :]
        self._count += len(now)
        self._fence()
        self._numbers[self._written] = self._count
        self._fence()
        return True


class RingReader:
    """A reading end."""

    def __init__(self, ring: memoryview, numbers: memoryview, written: int, read: int) -> None:
        self._ring, self._numbers = ring, numbers
        self._written, self._read = written, read
        self._count = 0
        self._fence = new_fence()
        self._frames = Frames()

    def has_news(self) -> bool:
        return bool(self._numbers[self._written] != self._count)

    def messages(self) -> list[bytes]:
        """The messages that have become complete since the last look."""
        written = self._numbers[self._written]
        if written == self._count:
            return []
        self._fence()
        at, size = self._count % len(self._ring), len(self._ring)
        end = at + written - self._count
        data = bytes(self._ring[at : min(end, size)])
        if end > size:
            data += bytes(self._ring[: end - size])
        self._count = written
        self._fence()
        self._numbers[self._read] = written
        return self._frames.feed(data)


class Ringer:
    """One who rings bells. `stamp` and `step` are such that no two ringers ever write the same
    value.

    Used by one thread at a time.
    """

    def __init__(self, numbers: memoryview, address: int, stamp: int, step: int) -> None:
        self._numbers, self._address = numbers, address
        self._stamp, self._step = stamp, step
        self._fence = new_fence()

    def ring(self, rank: int) -> None:
        """Something was written for a rank: whoever looks after it there sees it, and is woken if
        nobody else would."""
        numbers, line = self._numbers, rank * LINE
        self._stamp += self._step
        numbers[line + BELL] = self._stamp
        self._fence()
        caller = numbers[line + CALLER]
        if caller == ASLEEP:
            wake(self._address + line * 8, 1, _CALLER_BIT)
        elif caller == AWAY and numbers[line + THREAD] == ASLEEP:
            wake(self._address + line * 8, 1, _THREAD_BIT)

    def wake_thread(self, rank: int) -> None:
        """Wake the thread of a rank, also when a caller drives there."""
        self._stamp += self._step
        self._numbers[rank * LINE + BELL] = self._stamp
        wake(self._address + rank * LINE * 8, 1, _THREAD_BIT)


def sleep_on_bell(address: int, seen: int, seconds: float, is_caller: bool) -> None:
    """Until the bell at this address has another value than the one seen, at most so long."""
    sleep_until_changed(address, seen, seconds, _CALLER_BIT if is_caller else _THREAD_BIT)
