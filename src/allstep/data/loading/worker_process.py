"""What a worker process of the loader runs: fills chunks until the loader hangs up.

`processes` is the other side.
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

from allstep.data.loading.fill import Recipe, Rows, Stopped, fill
from allstep.data.loading.processes import Cell, receive, send
from allstep.process.liveness import Life, life_of


def main(fd: int, parent: int) -> None:
    """Runs until the socket `fd` ends or the process `parent` is gone."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the loader stops us when it means to
    sock = socket.socket(fileno=fd)
    _end_with(sock, parent)
    try:
        payload, (cell,) = receive(sock)
        worker = Worker(Cell(cell), payload)
        while True:
            question, fds = receive(sock)
            send(sock, worker.answer(pickle.loads(question), fds), [])
    except (EOFError, OSError):
        os._exit(0)  # the loader is gone; nobody waits for anything of ours


def _end_with(sock: socket.socket, parent: int) -> None:
    """A thread that ends this process, whatever it is doing, as soon as the loader hangs up or its
    process dies."""
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

    # The thread holds the life: its file is closed with it.
    threading.Thread(target=watch, args=(life,), daemon=True).start()


class Worker:
    """The recipe, and the batch memory that is mapped here."""

    def __init__(self, cell: Cell, payload: bytes) -> None:
        self._cell = cell
        self._maps: dict[int, mmap.mmap] = {}
        self._recipe: Recipe | None = None
        self._answer: dict[str, Any] = {}
        try:
            self._recipe = cloudpickle.loads(payload)
        except BaseException as error:
            self._answer = _describe_error(error)
        _use_one_thread()

    def answer(self, question: dict[str, Any], fds: list[int]) -> bytes:
        """The answer to a question, pickled."""
        if self._recipe is None:
            return pickle.dumps(self._answer)
        try:
            return pickle.dumps({"rows": self._fill(self._recipe, question, fds)})
        except Stopped:
            return pickle.dumps({"stopped": True})
        except BaseException as error:
            return pickle.dumps(_describe_error(error))

    def _fill(self, recipe: Recipe, question: dict[str, Any], fds: list[int]) -> Rows:
        samples, serial = question["samples"], question["serial"]
        out = self._rows(question, fds) if "buffer" in question else None
        return fill(
            recipe,
            samples,
            out,
            recipe.draw(question["epoch"], samples),
            lambda: self._cell.read() >= serial,
        )

    def _rows(self, question: dict[str, Any], fds: list[int]) -> NDArray[Any]:
        for number in question["forget"]:
            self._maps.pop(number, None)
        for fd in fds:
            self._maps[question["buffer"]] = mmap.mmap(fd, question["nbytes"])
            os.close(fd)
        raw, dtype, shape = (
            self._maps[question["buffer"]],
            np.dtype(question["dtype"]),
            question["shape"],
        )
        return np.frombuffer(raw, dtype, int(np.prod(shape)), question["offset"]).reshape(shape)


def _describe_error(error: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = b""
    last_line = traceback.format_exception_only(error)[0].strip()
    return {"error": pickled, "traceback": text, "last_line": last_line}


def _use_one_thread() -> None:
    """Processes are as many as there are cores; threads within them would only get in each other's
    way."""
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(1)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
