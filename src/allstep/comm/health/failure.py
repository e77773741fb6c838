"""Operations and failures in words: what a rank was doing, and why its group is of no more use.

A failure is found by one rank and passed on to the others, so it is written for all of them:
`reason` says what happened ("rank 2 is gone (its process ended)"), and each rank adds what it was
doing itself when it raises the error.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from allstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost

_KINDS: dict[str, type[CommError]] = {
    kind.__name__: kind for kind in (PeerLost, CollectiveTimeout, CommError)
}


class Operation:
    """A collective or transfer, from when somebody begins to wait for it.

    said: it in words, or a function that says it (nobody may ever ask). number: how many
    collectives this rank had begun with it; 0 for a transfer, which other ranks need not take part
    in. limit: seconds that the call itself was given.
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
        self.on_failure: Callable[[], None] | None = None  # called when the group fails meanwhile
        self.inquiry: Any = None  # see `guard`: who is missing?

    def begin(self) -> None:
        """Somebody waits for it from now on."""
        self.began, self.thread = time.monotonic(), threading.get_ident()

    @property
    def seconds(self) -> float:
        """How long it has been waited for."""
        return time.monotonic() - self.began

    def __str__(self) -> str:
        if not isinstance(self._text, str):
            self._text = self._text()
        return self._text


class Failure(NamedTuple):
    """Why a group is of no more use.

    `peer` and `teller` are ranks as the user counts them; `teller` found it out.
    """

    kind: str
    reason: str
    peer: int | None
    teller: int

    def error(self, rank: int, operation: Operation | None) -> CommError:
        """What `rank` raises for an operation that this failure ended."""
        text = f"{operation}: " if operation is not None else ""
        seconds = operation.seconds if operation is not None else 0.0
        told = f", told by rank {self.teller}" if self.teller != rank else ""
        first, *rest = self.reason.split("\n")
        message = "\n".join([f"{text}{first}; rank {rank} waited {seconds:.1f} s{told}", *rest])
        name, tensor = op_and_tensor(str(operation)) if operation is not None else (None, None)
        return _KINDS[self.kind](
            message, rank=rank, op=name, tensor=tensor, peer=self.peer, seconds=seconds
        )

    def to_json(self, most: int = 1 << 16) -> str:
        """At most so many bytes: the end of a long reason is cut off."""
        text = json.dumps(self._asdict())
        if len(text) <= most:
            return text
        return self._replace(
            reason=self.reason[: len(self.reason) * most // len(text) - 1]
        ).to_json(most)


def from_json(text: str) -> Failure:
    """The inverse of `Failure.to_json`."""
    return Failure(**json.loads(text))


def op_and_tensor(text: str) -> tuple[str, str | None]:
    """`all_reduce(float32 [3], SUM)` is an all_reduce of float32 [3]."""
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
