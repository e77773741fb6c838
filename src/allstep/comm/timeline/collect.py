"""How the lines of all ranks get into one file.

A thread on every rank takes the recorder's operations, twice a second and at the end. On rank 0 it
writes its own lines and those that it finds in the store. On the other ranks it puts its lines into
the store, unless the last few chunks have not been read yet. A recorder that is not emptied counts
the operations that it leaves out. So neither the store nor the memory of a rank fills up, however
slow rank 0 is.

At the end rank 0 waits a moment for the last lines of the others, but not for lost ranks. A full
disk ends the timeline on all ranks with a line on standard error; a lost store ends it silently,
since the run ends with it. Neither stops the run.
"""

import contextlib
import threading
import time
import zlib

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from allstep.comm.timeline import recorder
from allstep.comm.timeline.chrome_trace import Chrome, TraceFile
from allstep.comm.timeline.recorder import Recorder
from allstep.console.escape import print_notice
from allstep.errors import ConfigError

# Seconds; an operation is in the file after two periods.
_PERIOD = 0.5
# Seconds that rank 0 waits at the end for the lines of the others.
_LAST_LINES = 2.0
# Seconds after which a thread that does not end is abandoned.
_JOIN_SECONDS = 2 * _LAST_LINES
# Chunks of a rank in the store at a time.
_MAX_CHUNKS = 3
# The key with which rank 0 signals that it reads no more lines.
_OVER = "over"
_STORE_IS_GONE = (OSError, dist.DistError)


class Part:
    """One rank's part in a timeline."""

    def __init__(self, chrome: Chrome, store: Store) -> None:
        self._chrome = chrome
        self._store = store
        self._recorder = Recorder()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="allstep-timeline", daemon=True)

    def start(self, introduction: str) -> None:
        self._put(introduction)
        recorder.active = self._recorder
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(_JOIN_SECONDS)

    def _serve(self) -> None:
        try:
            while not self._ending.wait(_PERIOD):
                self._turn()
            self._finish()
        except ConfigError as error:
            print_notice(f"{error}; the timeline ends here, the run continues")
        # The run ends with its store.
        except _STORE_IS_GONE:
            pass
        finally:
            if recorder.active is self._recorder:
                recorder.active = None

    def _put(self, lines: str) -> None:
        raise NotImplementedError

    def _turn(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    def _put_new(self) -> None:
        operations, num_left_out = self._recorder.take()
        lines = self._chrome.operations(operations)
        if num_left_out:
            lines += self._chrome.left_out(num_left_out, recorder.clock())
        if lines:
            self._put(lines)


class Sender(Part):
    """The thread of every rank but the first: puts its lines into the store, by chunks."""

    def __init__(self, chrome: Chrome, store: Store, rank: int) -> None:
        super().__init__(chrome, store)
        self._rank = rank
        self._num_sent = 0

    def _put(self, lines: str) -> None:
        data = zlib.compress(lines.encode(), 1)
        # torch's stub does not list bytes, which are accepted.
        self._store.set(_chunk(self._rank, self._num_sent), data)  # type: ignore[arg-type]
        self._num_sent += 1

    def _turn(self) -> None:
        if self._store.check([_OVER]):
            self._ending.set()
            recorder.active = None
        elif not self._store.check([_chunk(self._rank, self._num_sent - _MAX_CHUNKS)]):
            self._put_new()

    def _finish(self) -> None:
        if not self._store.check([_OVER]):
            self._put_new()
            self._store.set(_end(self._rank), str(self._num_sent))


class Writer(Part):
    """The thread of rank 0: writes its own lines and those of the others."""

    def __init__(self, chrome: Chrome, store: Store, size: int, file: TraceFile) -> None:
        super().__init__(chrome, store)
        self._file = file
        # Chunks read so far, of the ranks that have not ended.
        self._num_taken = dict.fromkeys(range(1, size), 0)

    def _put(self, lines: str) -> None:
        try:
            self._file.write(lines)
        except ConfigError:
            self._signal_end()
            raise

    def _turn(self) -> None:
        self._put_new()
        self._take()

    def _finish(self) -> None:
        self._put_new()
        until = time.monotonic() + _LAST_LINES
        while self._num_taken and time.monotonic() < until:
            self._take()
            time.sleep(0.01)
        self._file.close(self._chrome.time(recorder.clock()))
        self._signal_end()

    def _take(self) -> None:
        """Write what the other ranks have sent; if the store is lost, only our own lines remain."""
        try:
            for rank in list(self._num_taken):
                self._take_from(rank)
        except _STORE_IS_GONE:
            self._num_taken.clear()

    def _take_from(self, rank: int) -> None:
        while self._store.check([key := _chunk(rank, self._num_taken[rank])]):
            self._put(zlib.decompress(self._store.get(key)).decode())
            self._store.delete_key(key)
            self._num_taken[rank] += 1
        if (
            self._store.check([_end(rank)])
            and int(self._store.get(_end(rank))) == self._num_taken[rank]
        ):
            del self._num_taken[rank]

    def _signal_end(self) -> None:
        with contextlib.suppress(*_STORE_IS_GONE):
            self._store.set(_OVER, "")


def _chunk(rank: int, number: int) -> str:
    return f"{rank}/{number}"


def _end(rank: int) -> str:
    """Return the key for the number of chunks that a rank has sent in all."""
    return f"{rank}/end"
