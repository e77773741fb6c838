"""Worker processes, as the loader sees them: each is driven by one thread of `prefetch`, over one
socket.

```
thread i  --chunk: samples, place in batch memory (the memory itself, a file descriptor, when it is new)-->  process i (workers_main)
          <--targets, fields, bad samples; or the error with its
          traceback----------------------------------
```

A process is sent the next chunk before it has answered the last (`DEPTH`), so that it need not wait
for this process to wake up between two chunks. Answers come in the order of the questions.

Images never pass through the socket: the process writes them into the batch memory that both map.
Recipe and functions are sent by cloudpickle, so functions of a script or a notebook need no module
and no `if __name__ == "__main__"`. One number in shared memory says up to which chunk everything is
cancelled; processes look at it between two samples.

A process ends when its socket does or its parent dies (it watches both). One that was killed is an
error at once, since the socket ends with it.
"""

import math
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from allstep.data.loading.fill import Recipe, Rows, Stopped
from allstep.data.loading.memory import SharedBuffer
from allstep.data.loading.prefetch import Finish, Stop
from allstep.data.loading.share import Share
from allstep.errors import AllstepError, ConfigError

_LENGTH = struct.Struct("<Q")
DEPTH = 2
"""Chunks that a process has at most."""
# Bytes of a question that a socket takes without waiting for its reader, by far. A longer one is
# sent to an idle process only: one that is itself waiting for us to take an answer would not read.
_ROOM = 32 << 10
_GRACE = 2.0  # seconds that a process has to end by itself
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)


class Processes:
    """`num` worker processes for one recipe.

    They serve one iteration at a time; `free` says that there is none.
    """

    def __init__(self, recipe: Recipe, num: int) -> None:
        self.free = True
        self._pid = os.getpid()
        payload = _pickled(recipe)
        self._cell = Cell()
        self._lock = threading.Lock()
        self._last = 0
        self.links = [Link(self, number) for number in range(num)]
        for link in self.links:  # all are starting by now
            with suppress(OSError):  # one that is dead is found when it is needed
                send(link.sock, payload, [self._cell.fd])

    @property
    def broken(self) -> bool:
        """Whether one of them is dead, or, between two iterations, stuck in a chunk that nobody
        wants any more."""
        return any(link.busy or link.process.poll() is not None for link in self.links)

    def serial(self) -> int:
        """A number for the next chunk; the threads of all links ask."""
        with self._lock:
            self._last += 1
            return self._last

    def cancel(self) -> None:
        """Nobody wants what was asked for so far."""
        self._cell.write(self._last)

    def close(self) -> None:
        """Ends them all; a second time does nothing. They are not a fork's to end."""
        if os.getpid() != self._pid:
            return
        for link in self.links:
            link.disconnect()
        for link in self.links:
            link.end()
        self._cell.close()


class _Request:
    """A question that a process was sent: about which samples, and the answer once it is there."""

    def __init__(self, samples: list[int], stop: Stop) -> None:
        self.samples, self.stop = samples, stop
        self.answer: bytes | None = None


class Link:
    """One process and the socket to it, for one thread."""

    def __init__(self, crew: Processes, number: int) -> None:
        self._disconnected = False
        self._unanswered: deque[_Request] = deque()
        self._serial, self._number = crew.serial, number
        self._known: set[int] = set()  # numbers of the buffers that the process has mapped
        self.sock, theirs = socket.socketpair()
        self.process = _start(theirs)
        theirs.close()

    @property
    def busy(self) -> bool:
        """Whether it owes an answer."""
        return bool(self._unanswered)

    def begin(self, share: Share, chunk: slice, stop: Stop) -> Finish:
        """Has a chunk filled by the process; what comes back waits for that."""
        serial = self._serial()
        # Asked after the number was taken: `cancel` comes after the stop, and so knows all numbers
        # that are under way.
        if stop():
            raise Stopped
        question, fds = self._question(share, chunk, serial)
        asked = _Request(share.samples[chunk].tolist(), stop)
        try:
            while self._unanswered and len(question) > _ROOM:
                self._receive()
            self._unanswered.append(asked)
            send(self.sock, question, fds)
        except (OSError, EOFError) as error:
            raise self._lost(asked) from error
        return partial(self._finish, asked)

    def _finish(self, asked: _Request) -> Rows:
        try:
            while asked.answer is None:
                self._receive()
        except (OSError, EOFError) as error:
            raise self._lost(asked) from error
        return _opened(pickle.loads(asked.answer), self.process.pid)

    def _receive(self) -> None:
        """Takes the next answer, which belongs to the oldest question."""
        answer, _ = receive(self.sock)
        self._unanswered.popleft().answer = answer

    def _lost(self, asked: _Request) -> Exception:
        """What it means that the socket has ended."""
        if asked.stop():
            return Stopped()
        if self._disconnected:
            return AllstepError("the loader was closed within a loop over it; a new loop may begin")
        return AllstepError(self._describe_end(asked.samples))

    def _question(self, share: Share, chunk: slice, serial: int) -> tuple[bytes, list[int]]:
        """A chunk as a message, and the memory that the process has not mapped yet."""
        out, buffer = share.rows_of(chunk), share.buffer
        question: dict[str, Any] = {
            "serial": serial,
            "epoch": share.span.epoch,
            "samples": share.samples[chunk],
        }
        fds: list[int] = []
        if isinstance(buffer, SharedBuffer) and out is not None:
            row = out[0:1].nbytes if len(out) else 0
            question |= {"shape": out.shape, "dtype": out.dtype.str, "offset": chunk.start * row}
            question |= {"buffer": buffer.number, "nbytes": buffer.nbytes, "forget": self._dead()}
            fds = [] if buffer.number in self._known else [buffer.fd]
            self._known.add(buffer.number)
        return pickle.dumps(question), fds

    def _dead(self) -> list[int]:
        gone = self._known - SharedBuffer.alive
        self._known -= gone
        return list(gone)

    def _describe_end(self, samples: list[int]) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE)
        code = self.process.returncode
        how = (
            f"was killed by {_signal(-code)}"
            if code is not None and code < 0
            else f"ended with status {code}"
        )
        hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
        return (
            f"worker process {self._number} of the loader (pid {self.process.pid}) {how} while it"
            f" worked on the samples {samples}{hint}; workers=0 runs the same in this process"
        )

    def disconnect(self) -> None:
        """Tells the process to end."""
        self._disconnected = True
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def end(self) -> None:
        """Waits for its end, and makes it end if it must."""
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _ByteLimit:
    """A file that keeps nothing, and takes at most `limit` bytes."""

    def __init__(self, limit: float) -> None:
        self.limit, self.left = limit, limit

    def write(self, content: Any) -> int:
        nbytes = memoryview(content).nbytes
        self.left -= nbytes
        if self.left < 0:
            raise ValueError(f"more than {self.limit:.0f} bytes")
        return nbytes


def why_not_sendable(thing: Any, limit: float = math.inf) -> str | None:
    """Why `thing` cannot be sent to another process, or not in `limit` bytes; None when it can."""
    try:
        cloudpickle.dump(thing, _ByteLimit(limit))
    except Exception as error:  # whatever a user's __reduce__ or __getstate__ raises
        return f"{type(error).__name__}: {error}"
    return None


def _pickled(recipe: Recipe) -> bytes:
    try:
        payload: bytes = cloudpickle.dumps(recipe)
    except Exception as error:
        operations = recipe.transform.operations if recipe.transform else ()
        culprit = next((each for each in operations if why_not_sendable(each)), recipe.source)
        raise ConfigError(
            f"{culprit!r} cannot be sent to worker processes: {error}; kind='threads' needs no"
            " sending"
        ) from error
    return payload


class Cell:
    """One number in memory that processes share; made here, or mapped from `fd`."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("allstep-cancelled", os.MFD_CLOEXEC) if fd is None else fd
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._map = mmap.mmap(self.fd, mmap.PAGESIZE)

    def read(self) -> int:
        """The number."""
        value: int = _LENGTH.unpack_from(self._map)[0]
        return value

    def write(self, value: int) -> None:
        """Sets it; eight bytes that are aligned are written at once.

        Nobody hears of it after `close`.
        """
        if self.fd >= 0:
            _LENGTH.pack_into(self._map, 0, value)

    def close(self) -> None:
        """Lets go of it; closing twice does nothing."""
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
        self.fd = -1


def send(sock: socket.socket, message: bytes, fds: list[int]) -> None:
    """One message; the descriptors travel with its length."""
    header = _LENGTH.pack(len(message))
    if fds:
        socket.send_fds(sock, [header], fds)
        sock.sendall(message)
    else:
        sock.sendall(header + message)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One message and its descriptors. EOFError when the other side is gone."""
    header, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 4)
    header += _exactly(sock, _LENGTH.size - len(header))
    return _exactly(sock, _LENGTH.unpack(header)[0]), list(fds)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    parts = []
    while nbytes:
        part = sock.recv(min(nbytes, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def _start(theirs: socket.socket) -> "subprocess.Popen[bytes]":
    fd = theirs.fileno()
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from allstep.data.loading.worker_process import"
        f" main; main({fd}, {os.getpid()})"
    )
    env = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
    return subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[fd], stdin=subprocess.DEVNULL, env=env
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _opened(answer: dict[str, Any], pid: int) -> Rows:
    if "rows" in answer:
        rows: Rows = answer["rows"]
        return rows
    if "stopped" in answer:
        raise Stopped
    raise _rebuilt(answer, pid)


def _rebuilt(answer: dict[str, Any], pid: int) -> BaseException:
    """The process's error with its traceback as a note; one that cannot be pickled is told by its
    last line."""
    try:
        error = pickle.loads(answer["error"])
    except Exception:
        error = AllstepError(f"a worker process of the loader failed: {answer['last_line']}")
    error.add_note(f"in worker process {pid} of the loader:\n{answer['traceback']}")
    return error if isinstance(error, BaseException) else AllstepError(str(error))
