"""The board of ranks on one host: mailboxes and a log in shared memory.

    memory    | flags of all ranks | mailbox of rank 0 | mailbox of rank 1 | ... | log |

A rank writes its posts into its mailbox and rings rank 0. Rank 0 writes the log and rings all other
ranks. `byte_ring` explains rings and bells.
"""

import os
import threading
from collections.abc import Sequence

from allstep.comm.health.processes import Lives
from allstep.comm.memory.kept import HostMemory, Sizes
from allstep.engine.board.board import Board
from allstep.engine.board.byte_ring import (
    ASLEEP,
    AWAY,
    BELL,
    CALLER,
    CLOSED,
    LINE,
    LOG_READ,
    LOOKING,
    NEEDS_ROOM,
    READ,
    THREAD,
    WRITTEN,
    Ringer,
    RingReader,
    RingWriter,
    sleep_on_bell,
)
from allstep.process.futex import address_of, new_fence

BOARD = "board of the engine"
"""The purpose of the board's memory."""
MAILBOX, LOG = 64 << 10, 256 << 10
# An answer takes this many times as long as a hand-over: up to 70 us of polling.
_SPIN_FACTOR = 20
_YIELDS = 10


def board_sizes(size: int) -> Sizes:
    """Return the sizes of the memory of a board of `size` ranks: the pools are the mailboxes."""
    return Sizes(size * LINE * 8, MAILBOX, LOG)


class SharedBoard(Board):
    """The board of ranks of one host.

    `memory`: see `board_sizes`. `pids`: the process ids of all ranks. `spins`: how often a
    hand-over polls before it yields the core.
    """

    def __init__(self, memory: HostMemory, rank: int, pids: Sequence[int], spins: int) -> None:
        super().__init__(rank, len(pids))
        size = self.size
        control, boxes, log = memory.control, memory.pools, memory.common
        self._numbers = numbers = control[: size * LINE * 8].cast("q")
        self._line = rank * LINE
        self._address = address_of(control)
        self._spins = spins * _SPIN_FACTOR
        self._posting = threading.Lock()
        self._poster = Ringer(numbers, self._address, rank + 1, 2 * size)
        self._driver = Ringer(numbers, self._address, size + rank + 1, 2 * size)
        self._fence, self._thread_fence = new_fence(), new_fence()
        self._seen = 0
        others = range(1, size)
        self._log_writer: RingWriter | None = None
        self._mail_readers: list[tuple[int, RingReader]] = []
        if rank == 0:
            if size > 1:
                self._log_writer = RingWriter(
                    log, numbers, WRITTEN, [each * LINE + LOG_READ for each in others]
                )
            self._mail_readers = [
                (each, RingReader(boxes[each], numbers, each * LINE + WRITTEN, each * LINE + READ))
                for each in others
            ]
        else:
            self._mail_writer = RingWriter(
                boxes[rank], numbers, self._line + WRITTEN, [self._line + READ]
            )
            self._log_reader = RingReader(log, numbers, WRITTEN, self._line + LOG_READ)
        watched = others if rank == 0 else [0]
        self._lives = Lives({each: pids[each] for each in watched if each != rank})

    # Posts

    def post(self, frame: bytes, driving: bool = False) -> None:
        with self._posting:
            if self.rank == 0:
                self._own_posts.append(frame[4:])
            else:
                self._mail_writer.write(frame)
                self._numbers[self._line + NEEDS_ROOM] = bool(self._mail_writer.unsent)
            if self.rank or not driving:
                self._poster.ring(0)

    def posts(self) -> list[tuple[int, bytes]]:
        found = self._take_own_posts()
        numbers = self._numbers
        for rank, reader in self._mail_readers:
            if reader.has_data():
                found += [(rank, message) for message in reader.messages()]
                if numbers[rank * LINE + NEEDS_ROOM]:
                    self._driver.ring(rank)
        return found

    # The log

    def publish(self, frames: Sequence[bytes]) -> None:
        self._own_published.extend(frame[4:] for frame in frames)
        if self._log_writer is not None:
            self._log_writer.write(b"".join(frames))
            self._ring_readers(self._log_writer)

    def _ring_readers(self, log: RingWriter) -> None:
        self._numbers[NEEDS_ROOM] = bool(log.unsent)
        for rank in range(1, self.size):
            self._driver.ring(rank)

    def published(self) -> list[bytes]:
        if self.rank == 0:
            return self._take_own_published()
        found = self._log_reader.messages()
        if found and self._numbers[NEEDS_ROOM]:
            self._driver.ring(0)
        return found

    # Waiting

    def look(self) -> None:
        self._seen = self._numbers[self._line + BELL]
        self._fence()
        if self.rank:
            if self._mail_writer.unsent:
                self.post(b"")
        elif self._log_writer is not None and self._log_writer.flush():
            self._ring_readers(self._log_writer)

    def has_work(self) -> bool:
        if self.rank:
            return self._log_reader.has_data() or _can_flush(self._mail_writer)
        if self._own_posts or self._own_published or _can_flush(self._log_writer):
            return True
        return any(reader.has_data() for _, reader in self._mail_readers)

    def attend(self) -> None:
        self._numbers[self._line + CALLER] = LOOKING

    def leave(self) -> None:
        self._numbers[self._line + CALLER] = AWAY
        self._fence()
        if self.has_work():
            self._driver.ring(self.rank)

    def wait(self, seconds: float) -> None:
        numbers, bell, seen = self._numbers, self._line + BELL, self._seen
        for _ in range(self._spins):
            if numbers[bell] != seen:
                return
        for _ in range(_YIELDS):
            if numbers[bell] != seen:
                return
            os.sched_yield()
        numbers[self._line + CALLER] = ASLEEP
        self._fence()
        if numbers[bell] == seen:
            sleep_on_bell(self._address + self._line * 8, seen, seconds, is_caller=True)
        numbers[self._line + CALLER] = LOOKING

    def sleep(self, seconds: float) -> None:
        numbers, line = self._numbers, self._line
        numbers[line + THREAD] = ASLEEP
        self._thread_fence()
        seen = numbers[line + BELL]
        self._thread_fence()
        if numbers[line + CALLER] != AWAY or not self.has_work():
            sleep_on_bell(self._address + line * 8, seen, seconds, is_caller=False)
        numbers[line + THREAD] = AWAY

    def wake(self) -> None:
        with self._posting:
            self._poster.wake_thread(self.rank)

    def nudge(self) -> None:
        with self._posting:
            self._poster.ring(self.rank)

    # The others

    def lost(self, closely: bool = False) -> int | None:
        for rank in range(1, self.size) if self.rank == 0 else (0,):
            if rank != self.rank and self._numbers[rank * LINE + CLOSED]:
                return rank
        return self._lives.lost(closely)

    def close(self) -> None:
        self._numbers[self._line + CLOSED] = 1
        self._lives.close()


def _can_flush(writer: RingWriter | None) -> bool:
    return writer is not None and bool(writer.unsent) and writer.room > 0
