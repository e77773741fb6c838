"""Tickets: only processes that the launcher has started may use the store of an elastic run.

The launcher issues one ticket for each worker that it starts, and passes it on in the environment
of that process. A ticket is text, `<name>-<secret>`: the name is public and part of keys, the
secret is proved in the handshake and never sent::

    claim = name | process | HMAC-SHA256(ticket, "ticket" | port | Ns | Nc | name | process)

`process` is a random number that the first process with a ticket chooses. It also puts it into its
environment, for the processes that it starts. The first claim binds the ticket to this number. So

* a ticket is valid once: a second process that was given the same one is refused;
* threads, forked processes and processes that the worker starts are the same worker;
* a revoked ticket is never valid again, and its connections are closed.

A connection with a ticket may read all keys, and write those outside `elastic/` and those of its
own worker there (`may_write`): plans and ends of generations are written by the launcher alone.
"""

import contextlib
import hmac
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from allstep.wire import keys
from allstep.wire.frames import LENGTH, pack, unpack

PROCESS = "ALLSTEP_TICKET_PROCESS"
"""Environment variable with the number of the process that uses a ticket."""
_choosing = threading.Lock()


class TicketRefused(ConnectionRefusedError):
    """The store does not admit this process, for the reason in the text."""

    reply = b""
    """The frame for the client, at the server."""
    address = "", 0
    """The address of the store, at the client."""


class Proofs(NamedTuple):
    """What proves a secret on one connection: the token, the server's port and both nonces."""

    token: str
    port: int
    server_nonce: bytes
    client_nonce: bytes

    def make(self, label: bytes, *parts: bytes, ticket: str = "") -> bytes:
        """Return an HMAC over label, port, nonces and parts; with the `ticket` if there is one."""
        # A frame gives each part its length, so that no two lists of parts have the same bytes.
        message = pack([label, b"%d" % self.port, self.server_nonce, self.client_nonce, *parts])
        return hmac.digest((ticket or self.token).encode(), message, "sha256")


def claim(ticket: str, proofs: Proofs) -> bytes:
    """Return what this process states at the store: the name of its ticket, and the proof."""
    parts = Tickets.name_of(ticket).encode(), _process().encode()
    # Without the length of a frame: it is a field of one.
    return pack([*parts, proofs.make(b"ticket", *parts, ticket=ticket)])[LENGTH.size :]


def _process() -> str:
    """Return the number of this process, which those that it starts inherit."""
    with _choosing:
        if not os.environ.get(PROCESS):
            os.environ[PROCESS] = secrets.token_hex(8)
        return os.environ[PROCESS]


class Tickets:
    """The tickets of a run. The launcher issues and revokes, the thread of the store checks."""

    def __init__(self) -> None:
        self._valid: dict[str, str] = {}
        # The process of each ticket that was used.
        self._used_by: dict[str, bytes] = {}
        self._revoked: set[str] = set()
        self._lock = threading.Lock()
        # Names whose connections are still open, and what wakes the thread that closes them.
        self._to_close: list[str] = []
        self.on_revoked: Callable[[], None] = lambda: None

    @staticmethod
    def name_of(ticket: str) -> str:
        """Return the public name of a ticket."""
        return keys.worker_of(ticket)

    def issue(self, name: str) -> str:
        """Return a new ticket for the worker of that name."""
        with self._lock:
            ticket = self._valid[name] = f"{name}-{secrets.token_hex(16)}"
        return ticket

    def revoke(self, ticket: str) -> None:
        """Make a ticket invalid and close its connections; a no-op for one that is invalid."""
        name = self.name_of(ticket)
        with self._lock:
            if self._valid.pop(name, None) is None:
                return
            self._used_by.pop(name, None)
            self._revoked.add(name)
            self._to_close.append(name)
        self.on_revoked()

    def take_revoked(self) -> Iterator[str]:
        """Yield the names whose connections must be closed, each once."""
        while self._to_close:
            with contextlib.suppress(IndexError):
                yield self._to_close.pop()

    def admit(self, who: bytes, proofs: Proofs) -> str:
        """Return the ticket that a client has claimed; TicketRefused if it is not admitted."""
        if not who:
            raise TicketRefused(
                "it has no ticket (ALLSTEP_TICKET); only workers that the launcher starts may join"
                " this run"
            )
        try:
            name, process, proof = unpack(who)
            worker = name.decode()
        except ValueError:
            raise TicketRefused("its ticket is malformed") from None
        with self._lock:
            return self._checked(worker, process, proofs, proof)

    def _checked(self, worker: str, process: bytes, proofs: Proofs, proof: bytes) -> str:
        if worker in self._revoked:
            raise TicketRefused(
                f"the ticket of worker {worker} is not valid any more: the run has ended it, or"
                " continues without it"
            )
        ticket = self._valid.get(worker, "")
        expected = proofs.make(b"ticket", worker.encode(), process, ticket=ticket)
        if not ticket or not hmac.compare_digest(proof, expected):
            raise TicketRefused("its ticket is unknown to this run")
        if self._used_by.setdefault(worker, process) != process:
            raise TicketRefused(
                f"the ticket of worker {worker} is used by another process: a ticket admits one"
            )
        return ticket


def may_write(worker: str, key: bytes) -> bool:
    """Return whether a worker may write a key of the store."""
    if key == keys.HOSTS.encode():
        return False
    if not key.startswith(b"elastic/"):
        return True
    own = keys.ask_of(worker, 0).removesuffix("0").encode()
    return key.startswith(own) or key == keys.progress_of(worker).encode()
