"""Streams of bytes through shared memory, and the bell that wakes a process when data has arrived.

**Ring.** It has one writer and one or several readers. The writer counts the bytes that it has
written, each reader the bytes that it has read. Both counts only grow; byte n is stored at n modulo
the size of the ring. Bytes that do not fit stay with the writer, which continues when the readers
have made room, so a message may be larger than the ring. In the stream, each message follows its
length.

**Bell.** Every process has an integer that other processes change after they have written data for
it. The change is enough for a process that polls the integer; a process that sleeps on it in the
kernel is also woken. Two threads may sleep there, and only one must be woken: a caller that waits
for a result and drives the engine, or the engine's own thread when no caller drives. Each value
that is written to a bell differs from the previous one. So a thread that reads the bell, then finds
no data, and then sleeps on the value that it read misses no ring.

A memory fence separates data and counts (`allstep.process.futex`).
"""

from collections.abc import Sequence

from allstep.process.futex import new_fence, sleep_until_changed, wake
from allstep.wire.frames import LENGTH

# Numbers of eight bytes per rank: 128 bytes, so that no two ranks share a cache line.
LINE = 16
# The numbers of each rank.
BELL, CALLER, THREAD, WRITTEN, READ, LOG_READ, NEEDS_ROOM, CLOSED = range(8)
# The states of a caller; the engine's thread is AWAY or ASLEEP.
AWAY, LOOKING, ASLEEP = 0, 1, 2

_THREAD_BIT, _CALLER_BIT = 1, 2


class Frames:
    """Assembles messages from the chunks of a stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that this chunk completes."""
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
    """The writing end of a ring. `written`, `reads`: positions of the counts in `numbers`."""

    def __init__(
        self, ring: memoryview, numbers: memoryview, written: int, reads: Sequence[int]
    ) -> None:
        self._ring, self._numbers = ring, numbers
        self._written, self._reads = written, reads
        self._count = 0
        self._fence = new_fence()
        self.unsent = b""

    def write(self, frame: bytes) -> bool:
        """Append a message to the stream; return whether the readers can see some of it now."""
        self.unsent = self.unsent + frame if self.unsent else frame
        return self.flush()

    @property
    def room(self) -> int:
        """The free bytes of the ring."""
        numbers = self._numbers
        return len(self._ring) - self._count + min(numbers[at] for at in self._reads)

    def flush(self) -> bool:
        """Write as much as there is room for; return whether that was at least one byte."""
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
    """A reading end of a ring. `written`, `read`: positions of the counts in `numbers`."""

    def __init__(self, ring: memoryview, numbers: memoryview, written: int, read: int) -> None:
        self._ring, self._numbers = ring, numbers
        self._written, self._read = written, read
        self._count = 0
        self._fence = new_fence()
        self._frames = Frames()

    def has_data(self) -> bool:
        """Return whether there are bytes to read."""
        return bool(self._numbers[self._written] != self._count)

    def messages(self) -> list[bytes]:
        """Return the messages that have become complete since the last call."""
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
    """Rings the bells of ranks, for one thread at a time.

    `stamp` and `step` are chosen such that no two ringers ever write the same value.
    """

    def __init__(self, numbers: memoryview, address: int, stamp: int, step: int) -> None:
        self._numbers, self._address = numbers, address
        self._stamp, self._step = stamp, step
        self._fence = new_fence()

    def ring(self, rank: int) -> None:
        """Notify a rank of new data; wake its sleeping caller or else its engine's thread."""
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
        """Wake the engine's thread of a rank, even if a caller drives there."""
        self._stamp += self._step
        self._numbers[rank * LINE + BELL] = self._stamp
        wake(self._address + rank * LINE * 8, 1, _THREAD_BIT)


def sleep_on_bell(address: int, seen: int, seconds: float, is_caller: bool) -> None:
    """Sleep until the bell at `address` differs from `seen`, at most `seconds`."""
    sleep_until_changed(address, seen, seconds, _CALLER_BIT if is_caller else _THREAD_BIT)
