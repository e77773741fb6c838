"""The program of a loader's worker process: fills chunks until the loader closes the socket.

`processes` is the loader's side.
"""

import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from allstep import faults
from allstep.data.loading.fill import Recipe, Rows, Stopped, fill
from allstep.data.loading.process_workers import Cell, receive, send
from allstep.process.liveness import Life, life_of
from allstep.process.stop_signals import stop_signals


def main(fd: int, parent: int) -> None:
    """Serve requests until the socket `fd` is closed or the process `parent` has ended."""
    # Ctrl-C and signals of a queue system reach all processes of a run; the loader decides when its
    # workers stop.
    for number in (signal.SIGINT, *stop_signals(os.environ)):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    _end_with(sock, parent)
    try:
        faults.begin_helper("corrupt")
        payload, (cell,) = receive(sock)
        worker = Worker(Cell(cell), payload)
        while True:
            request, fds = receive(sock)
            send(sock, worker.reply(pickle.loads(request), fds), [])
    except (EOFError, OSError):
        # The loader has closed the socket: no reply is expected any more.
        os._exit(0)


def _end_with(sock: socket.socket, parent: int) -> None:
    """Start a thread that ends this process when the loader closes the socket or its process ends.

    The thread ends the process in the middle of a sample, too.
    """
    try:
        life = life_of(parent)
    except OSError:
        os._exit(0)
    if os.getppid() != parent:
        os._exit(0)
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.register(life, select.POLLIN)

    def watch(_: Life) -> None:
        poll.poll()
        os._exit(0)

    # The thread keeps `life` referenced: deleting it would close its descriptor.
    threading.Thread(target=watch, args=(life,), daemon=True).start()


class Worker:
    """The recipe, and the batch memory that this process has mapped."""

    def __init__(self, cell: Cell, payload: bytes) -> None:
        self._cell = cell
        self._maps: dict[int, mmap.mmap] = {}
        self._recipe: Recipe | None = None
        self._failure: dict[str, Any] = {}
        try:
            self._recipe = cloudpickle.loads(payload)
        except BaseException as error:
            self._failure = _describe_error(error)
        _use_one_thread()

    def reply(self, request: dict[str, Any], fds: list[int]) -> bytes:
        """Return the pickled reply to a request."""
        if self._recipe is None:
            return pickle.dumps(self._failure)
        try:
            return pickle.dumps({"rows": self._fill(self._recipe, request, fds)})
        except Stopped:
            return pickle.dumps({"stopped": True})
        except BaseException as error:
            return pickle.dumps(_describe_error(error))

    def _fill(self, recipe: Recipe, request: dict[str, Any], fds: list[int]) -> Rows:
        samples, serial = request["samples"], request["serial"]
        out = self._rows(request, fds) if "buffer" in request else None
        draws = recipe.draw(request["epoch"], samples)
        return fill(recipe, samples, out, draws, lambda: self._cell.read() >= serial)

    def _rows(self, request: dict[str, Any], fds: list[int]) -> NDArray[Any]:
        for number in request["forget"]:
            self._maps.pop(number, None)
        for fd in fds:
            self._maps[request["buffer"]] = mmap.mmap(fd, request["nbytes"])
            os.close(fd)
        raw, shape = self._maps[request["buffer"]], request["shape"]
        dtype = np.dtype(request["dtype"])
        return np.frombuffer(raw, dtype, int(np.prod(shape)), request["offset"]).reshape(shape)


def _describe_error(error: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = b""
    last_line = traceback.format_exception_only(error)[0].strip()
    return {"error": pickled, "traceback": text, "last_line": last_line}


def _use_one_thread() -> None:
    """Limit cv2 and torch to one thread: there is already one worker process per core."""
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(1)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
