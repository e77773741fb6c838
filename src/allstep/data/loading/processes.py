"""The loader's side of its worker processes: each is driven by one thread of `prefetch`, over one
socket.

```
thread i  --request: sample numbers, range of batch memory-->                 process i
            (and the memory's file descriptor, if it is new)                  (worker_process)
          <--reply: targets, fields, bad samples; or the error with traceback--
```

A process is sent the next chunk before it has replied to the last (`DEPTH`), so that it need not
wait between two chunks for this process to wake up. Replies arrive in the order of the requests.

Images do not pass through the socket: the process writes them into the batch memory that both
processes map. Recipe and functions are sent with cloudpickle, so functions of a script or a
notebook need no module and no `if __name__ == "__main__"`. One number in shared memory is the
serial number up to which all chunks are cancelled; processes check it between two samples.

A worker process ends when its socket closes or its parent ends; it watches both. A worker process
that was killed is noticed immediately, since its end closes the socket.
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
"""Maximum number of chunks that a process has been sent and has not completed."""
# Bytes of a request that a socket safely accepts before its reader reads. A longer request is sent
# only to an idle process: a busy one may itself wait for this process to read a reply, and then
# neither would read.
_ROOM = 32 << 10
# Seconds that a process has to end before it is killed.
_GRACE = 2.0
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)


class Processes:
    """`num` worker processes for one recipe.

    They serve one iteration at a time; `free` is True while there is none.
    """

    def __init__(self, recipe: Recipe, num: int) -> None:
        self.free = True
        self._pid = os.getpid()
        payload = _pickled(recipe)
        self._cell = Cell()
        self._lock = threading.Lock()
        self._last = 0
        self.links = [Link(self, number) for number in range(num)]
        # All processes are starting by now. One that has ended is detected at its first use.
        for link in self.links:
            with suppress(OSError):
                send(link.sock, payload, [self._cell.fd])

    @property
    def broken(self) -> bool:
        """Return whether a process has ended or is stuck.

        Stuck, between two iterations, is one that still works on a cancelled chunk.
        """
        return any(link.busy or link.process.poll() is not None for link in self.links)

    def serial(self) -> int:
        """Return the serial number of the next chunk; thread-safe."""
        with self._lock:
            self._last += 1
            return self._last

    def cancel(self) -> None:
        """Cancel all chunks requested so far."""
        self._cell.write(self._last)

    def close(self) -> None:
        """End all processes; a no-op the second time, and in a fork of their parent."""
        if os.getpid() != self._pid:
            return
        for link in self.links:
            link.disconnect()
        for link in self.links:
            link.end()
        self._cell.close()


class _Request:
    """A request to a process: its samples, and the reply once it has arrived."""

    def __init__(self, samples: list[int], stop: Stop) -> None:
        self.samples, self.stop = samples, stop
        self.reply: bytes | None = None


class Link:
    """One worker process and the socket to it; used by one thread."""

    def __init__(self, crew: Processes, number: int) -> None:
        self._disconnected = False
        self._unanswered: deque[_Request] = deque()
        self._serial, self._number = crew.serial, number
        # Numbers of the buffers that the process has mapped.
        self._known: set[int] = set()
        self.sock, theirs = socket.socketpair()
        self.process = _start(theirs)
        theirs.close()

    @property
    def busy(self) -> bool:
        """Return whether a reply is outstanding."""
        return bool(self._unanswered)

    def begin(self, share: Share, chunk: slice, stop: Stop) -> Finish:
        """Send a chunk to the process; return a function that waits until it is filled."""
        serial = self._serial()
        # Checked after the serial number was taken: `cancel` follows the stop, and so covers all
        # numbers that are under way.
        if stop():
            raise Stopped
        message, fds = self._message(share, chunk, serial)
        request = _Request(share.samples[chunk].tolist(), stop)
        try:
            while self._unanswered and len(message) > _ROOM:
                self._receive()
            self._unanswered.append(request)
            send(self.sock, message, fds)
        except (OSError, EOFError) as error:
            raise self._lost(request) from error
        return partial(self._finish, request)

    def _finish(self, request: _Request) -> Rows:
        try:
            while request.reply is None:
                self._receive()
        except (OSError, EOFError) as error:
            raise self._lost(request) from error
        return _rows_of(pickle.loads(request.reply), self.process.pid)

    def _receive(self) -> None:
        """Receive the next reply, which belongs to the oldest request."""
        reply, _ = receive(self.sock)
        self._unanswered.popleft().reply = reply

    def _lost(self, request: _Request) -> Exception:
        """Return the exception for a closed socket: a stop, a closed loader, or a lost process."""
        if request.stop():
            return Stopped()
        if self._disconnected:
            return AllstepError("the loader was closed within a loop over it; start a new loop")
        return AllstepError(self._describe_end(request.samples))

    def _message(self, share: Share, chunk: slice, serial: int) -> tuple[bytes, list[int]]:
        """Return the request for a chunk, and descriptors of memory new to the process."""
        out, buffer = share.rows_of(chunk), share.buffer
        message: dict[str, Any] = {
            "serial": serial,
            "epoch": share.span.epoch,
            "samples": share.samples[chunk],
        }
        fds: list[int] = []
        if isinstance(buffer, SharedBuffer) and out is not None:
            row = out[0:1].nbytes if len(out) else 0
            message |= {"shape": out.shape, "dtype": out.dtype.str, "offset": chunk.start * row}
            message |= {"buffer": buffer.number, "nbytes": buffer.nbytes, "forget": self._freed()}
            fds = [] if buffer.number in self._known else [buffer.fd]
            self._known.add(buffer.number)
        return pickle.dumps(message), fds

    def _freed(self) -> list[int]:
        freed = self._known - SharedBuffer.alive
        self._known -= freed
        return list(freed)

    def _describe_end(self, samples: list[int]) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE)
        code = self.process.returncode
        how = f"ended with status {code}"
        if code is not None and code < 0:
            how = f"was killed by {_signal(-code)}"
        hint = "; the kernel does this when memory runs out" if code == -signal.SIGKILL else ""
        return (
            f"worker process {self._number} of the loader (pid {self.process.pid}) {how} while it"
            f" worked on the samples {samples}{hint}; workers=0 does the same work in this process"
        )

    def disconnect(self) -> None:
        """Close the socket, which makes the process end."""
        self._disconnected = True
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def end(self) -> None:
        """Wait until the process has ended; kill it after the grace period."""
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _ByteLimit:
    """A file that discards its content, and raises ValueError after `limit` bytes."""

    def __init__(self, limit: float) -> None:
        self.limit, self.left = limit, limit

    def write(self, content: Any) -> int:
        nbytes = memoryview(content).nbytes
        self.left -= nbytes
        if self.left < 0:
            raise ValueError(f"more than {self.limit:.0f} bytes")
        return nbytes


def why_not_sendable(thing: Any, limit: float = math.inf) -> str | None:
    """Return why `thing` cannot be pickled in `limit` bytes; None if it can."""
    try:
        cloudpickle.dump(thing, _ByteLimit(limit))
    # A user's __reduce__ or __getstate__ may raise anything.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _pickled(recipe: Recipe) -> bytes:
    try:
        payload: bytes = cloudpickle.dumps(recipe)
    except Exception as error:
        operations = recipe.transform.operations if recipe.transform else ()
        culprit = next((each for each in operations if why_not_sendable(each)), recipe.source)
        raise ConfigError(
            f"{culprit!r} cannot be sent to worker processes: {error}; kind='threads' sends nothing"
        ) from error
    return payload


class Cell:
    """One number in memory that processes share; created, or mapped from `fd`."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("allstep-cancelled", os.MFD_CLOEXEC) if fd is None else fd
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._map = mmap.mmap(self.fd, mmap.PAGESIZE)

    def read(self) -> int:
        """Return the number."""
        value: int = _LENGTH.unpack_from(self._map)[0]
        return value

    def write(self, value: int) -> None:
        """Set the number; a no-op after `close`. Writes of eight aligned bytes are atomic."""
        if self.fd >= 0:
            _LENGTH.pack_into(self._map, 0, value)

    def close(self) -> None:
        """Unmap the memory; a no-op the second time."""
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
        self.fd = -1


def send(sock: socket.socket, message: bytes, fds: list[int]) -> None:
    """Send one message; the descriptors `fds` are attached to its header."""
    header = _LENGTH.pack(len(message))
    if fds:
        socket.send_fds(sock, [header], fds)
        sock.sendall(message)
    else:
        sock.sendall(header + message)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return one message and its descriptors; raise EOFError if the peer closed the socket."""
    header, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 4)
    header += _exactly(sock, _LENGTH.size - len(header))
    return _exactly(sock, _LENGTH.unpack(header)[0]), list(fds)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    parts = []
    while nbytes:
        part = sock.recv(min(nbytes, 1 << 20))
        if not part:
            raise EOFError("the peer closed the socket")
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


def _rows_of(reply: dict[str, Any], pid: int) -> Rows:
    if "rows" in reply:
        rows: Rows = reply["rows"]
        return rows
    if "stopped" in reply:
        raise Stopped
    raise _rebuilt(reply, pid)


def _rebuilt(reply: dict[str, Any], pid: int) -> BaseException:
    """Return the error of a worker process, with its traceback as a note.

    An error that cannot be pickled becomes an AllstepError with the last line of the traceback.
    """
    try:
        error = pickle.loads(reply["error"])
    except Exception:
        error = AllstepError(f"a worker process of the loader failed: {reply['last_line']}")
    error.add_note(f"in worker process {pid} of the loader:\n{reply['traceback']}")
    return error if isinstance(error, BaseException) else AllstepError(str(error))
