"""Descriptions of operations and failures: what a rank was doing, and why its group has failed.

One rank detects a failure and passes it on to the others, so the description is the same for all:
`reason` states what happened (for example the loss of rank 2), and each rank adds its own operation
when it raises the error.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from allstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost

_KINDS: dict[str, type[CommError]] = {
    kind.__name__: kind for kind in (PeerLost, CollectiveTimeout, CommError)
}


class Operation:
    """A collective or transfer that a thread of this rank waits for.

    `text` is its description, or a function that returns it (called only when needed). `number` is
    how many collectives this rank had begun, this one included; 0 for a transfer, which involves
    only two ranks. `limit` is the timeout of the call itself in seconds; None for the group's.
    """

    __slots__ = ("_text", "began", "inquiry", "limit", "number", "on_failure", "thread")

    def __init__(
        self, text: str | Callable[[], str], number: int = 0, limit: float | None = None
    ) -> None:
        self._text = text
        self.number = number
        self.limit = limit
        self.began = time.monotonic()
        self.thread = threading.get_ident()
        # Called if the group fails while the operation is under way.
        self.on_failure: Callable[[], None] | None = None
        # The `stall_inquiry.Inquiry` about missing ranks, once the wait takes long.
        self.inquiry: Any = None

    def begin(self) -> None:
        """Restart the clock: a thread waits for the operation from now on."""
        self.began, self.thread = time.monotonic(), threading.get_ident()

    @property
    def seconds(self) -> float:
        """How long a thread has waited for the operation, in seconds."""
        return time.monotonic() - self.began

    def __str__(self) -> str:
        if not isinstance(self._text, str):
            self._text = self._text()
        return self._text


class Failure(NamedTuple):
    """Why a group has failed and cannot be used any more.

    `kind` is the name of the error class to raise. `peer` (the rank at fault, if known) and
    `teller` (the rank that detected the failure) are numbers as the user counts ranks.
    """

    kind: str
    reason: str
    peer: int | None
    teller: int

    def error(self, rank: int, operation: Operation | None) -> CommError:
        """Return the error that `rank` raises for an operation that this failure ended."""
        prefix = f"{operation}: " if operation is not None else ""
        seconds = operation.seconds if operation is not None else 0.0
        source = f"; reported by rank {self.teller}" if self.teller != rank else ""
        first, *rest = self.reason.split("\n")
        message = "\n".join([f"{prefix}{first}; rank {rank} waited {seconds:.1f} s{source}", *rest])
        name, tensor = op_and_tensor(str(operation)) if operation is not None else (None, None)
        return _KINDS[self.kind](
            message, rank=rank, op=name, tensor=tensor, peer=self.peer, seconds=seconds
        )

    def to_json(self, max_bytes: int = 1 << 16) -> str:
        """Return this failure as JSON of at most `max_bytes`; the end of a long reason is cut."""
        text = json.dumps(self._asdict())
        if len(text) <= max_bytes:
            return text
        num_kept = len(self.reason) * max_bytes // len(text) - 1
        return self._replace(reason=self.reason[:num_kept]).to_json(max_bytes)


def from_json(text: str) -> Failure:
    """Return the failure that `Failure.to_json` wrote."""
    return Failure(**json.loads(text))


def op_and_tensor(text: str) -> tuple[str, str | None]:
    """Split a description: ("all_reduce", "float32 [3]") of `all_reduce(float32 [3], SUM)`."""
    tensor = re.search(r"\((\w+(?: \[[^\]]*\])?)", text)
    return text.partition("(")[0], tensor[1] if tensor else None


def blamed_rank(error: BaseException, rank: int) -> int | None:
    """Return the rank that caused an exception which ends the process of `rank`.

    That is the rank itself, unless the exception comes from an error between ranks: then the rank
    which that error names. None for errors that several ranks raise alike.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, CollectiveMismatch | CollectiveTimeout):
            return None
        if isinstance(at, CommError):
            return at.peer
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return rank


class FailureChannel(Protocol):
    """Memory that the ranks of a host share, in which a rank posts a failure for the others."""

    def post(self, failure: Failure) -> None: ...

    def posted(self) -> Failure | None: ...
