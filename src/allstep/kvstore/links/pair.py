"""One end of a link: a Gloo group of two processes, a worker and a server.

Messages are a header of eight int64 numbers and a payload of as many bytes as it states
(`rules.headers`). Both arrive in the order in which they are sent.

Gloo has a trap (torch 2.13): a thread that waits for a message of which a part has arrived is not
woken when the connection ends. So such a wait is made in a thread that can be abandoned, while
another one looks at the connection: `ended` asks the kernel (`comm.health.sockets`), which also
distinguishes a dead host from a slow process.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from allstep.comm.health.at_exit import keep
from allstep.comm.health.sockets import found
from allstep.kvstore.rules.headers import LENGTH, Header, read_header
from allstep.limits import MAX_SECONDS, Limits

# The number of either side in its group of two.
_SERVER, _WORKER = 0, 1
_TAG = 0
# Limits are enforced by those who look at the connection.
_NO_LIMIT = timedelta(seconds=MAX_SECONDS)
_SILENCE_SHARE, _MIN_SILENCE = 0.6, 2.0


class Pair:
    """One end of a link. Both sides create it at the same time, with the same `store`.

    is_server: which side this is. Raises RuntimeError if the other side does not come within
    `limits.start` seconds.
    """

    def __init__(self, store: Store, limits: Limits, *, is_server: bool) -> None:
        rank, self._peer = (_SERVER, _WORKER) if is_server else (_WORKER, _SERVER)
        seconds = timedelta(seconds=limits.start)
        # C++ alone does not keep a Python store alive.
        self._store = store
        self._gloo: Any
        self._gloo, self._sockets = found(
            lambda: ProcessGroupGloo(store, rank, 2, timeout=seconds),
            store,
            rank,
            2,
            limits.start,
            limits.lost,
        )
        self._silence = max(_MIN_SILENCE, _SILENCE_SHARE * limits.lost)

    def send(self, header: Header, payload: Tensor | None = None) -> None:
        """Send a message. payload: a flat tensor of bytes."""
        nbytes = 0 if payload is None else payload.numel()
        numbers = torch.tensor(header._replace(nbytes=nbytes).numbers(), dtype=torch.int64)
        self._send(numbers)
        if payload is not None and nbytes:
            self._send(payload)

    def _send(self, data: Tensor) -> None:
        self._gloo.send([data], self._peer, _TAG).wait(_NO_LIMIT)

    def receive(self) -> Header:
        """Return the header of the next message; BadHeader if it is none."""
        return self.begin_receive().wait()

    def receive_into(self, payload: Tensor) -> None:
        """Receive the payload of the message whose header came last."""
        if payload.numel():
            self._gloo.recv([payload], self._peer, _TAG).wait(_NO_LIMIT)

    def begin_receive(self, payload: Tensor | None = None) -> "Incoming":
        """Begin to receive a message whose payload will have the size of `payload`."""
        numbers = torch.empty(LENGTH, dtype=torch.int64)
        works = [self._gloo.recv([numbers], self._peer, _TAG)]
        if payload is not None and payload.numel():
            works.append(self._gloo.recv([payload], self._peer, _TAG))
        return Incoming(numbers, works)

    def ended(self) -> str | None:
        """Return why the other side is lost; None if it is not."""
        if self._sockets.closed():
            is_silent = self._sockets.silence(self._peer) >= self._silence
            return "no sign of life" if is_silent else "process exited"
        if self._sockets.silent(self._silence):
            return f"no sign of life for {self._silence:.0f} s"
        return None

    def shut(self) -> None:
        """End the connection after an error, for both sides. The group is left alone."""
        self._sockets.shut()
        # Its destructor waits for work in flight.
        keep([self._gloo, self._store])

    def close(self) -> None:
        """Leave the group in order; nothing may be in flight."""
        self._sockets.close()
        self._gloo = None


class Incoming:
    """A message that is being received."""

    __slots__ = ("_numbers", "_works")

    def __init__(self, numbers: Tensor, works: list[Any]) -> None:
        self._numbers, self._works = numbers, works

    def wait(self) -> Header:
        """Wait until all of it has arrived; return its header."""
        for work in self._works:
            work.wait(_NO_LIMIT)
        return read_header(self._numbers.tolist())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat, contiguous tensor as bytes, without a copy."""
    return (
        tensor.detach().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    )


def text_bytes(text: str) -> Tensor:
    """Return text as a tensor of bytes."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else _NOTHING


def bytes_text(data: Tensor) -> str:
    """Return the text of a tensor of bytes."""
    return bytes(data.numpy()).decode()


_NOTHING = torch.empty(0, dtype=torch.uint8)
