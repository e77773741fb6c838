"""The store itself: a table, and a thread that serves it.

The thread runs one loop and never blocks on a single client. `Door` lets clients in, `Table` holds
the values, `Parked` the requests that wait. This file decides whose turn it is, and when to stop:

* One request per connection and turn. A client that has sent 10,000 requests at once delays the
  others by one of its requests each time.
* A client that does not read its replies is not read from any more, once 1 MB of them waits here.
* What all connections hold here, coming and going, is bounded (512 MB). Past that the one that has
  held much for the longest time is dropped: it neither finishes its request nor reads its reply.
* Anything that goes wrong while one connection is served ends that connection. If the thread
  itself ends, for whatever reason, all connections end with it and `failure` says why.
"""

import contextlib
import functools
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from allstep.wire.connection import Connection
from allstep.wire.door import Door, listen
from allstep.wire.frames import Fields, pack, unpack
from allstep.wire.parked import Parked, Request
from allstep.wire.patience import checked
from allstep.wire.strangers import MOST, SECONDS
from allstep.wire.table import MAX_NBYTES, Table

_Reply = Fields | None
_AT_ONCE = ("set", "add", "append", "compare_set", "check", "delete", "count", "keys")
# A request names at most so many keys; a frame of 64 MB has room for millions of empty ones.
_MAX_FIELDS = 1 << 16
# Replies of one client that wait to be read, before its next request is served.
_FULL_OUTBOX = 1 << 20
# Behind a request that is parked. Clients of ours wait for the reply before they send again.
_MAX_BEHIND_PARKED = 1 << 18
# A number, or the name of an operation.
_MAX_WORD = 40
_MAX_HELD = 512 << 20
# A connection that holds less counts as one that holds nothing: to drop it would not help.
_MUCH_HELD = 1 << 18


class Server:
    """The store. Runs in a thread of its own process until `close()`; `port` is where it listens.

    host: "127.0.0.1" when all ranks are on this host, "" for every interface.
    stranger_seconds: how long a connection may go without showing the token.
    max_strangers: how many such connections may be open.
    max_nbytes: how many bytes all keys and values may have.
    max_held: how many bytes of requests and replies may be under way.
    """

    def __init__(
        self,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        stranger_seconds: float = SECONDS,
        max_strangers: int = MOST,
        max_nbytes: int = MAX_NBYTES,
        max_held: int = _MAX_HELD,
    ) -> None:
        self._table = Table(max_nbytes)
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        strangers = (stranger_seconds, max_strangers)
        self._door = Door(listen(host, port), token, self._selector, self._admit, *strangers)
        self.port = self._door.port
        self._wake_out, self._wake_in = socket.socketpair()
        # A pipe that is full wakes as well: a send that would block has nothing to add.
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)
        self._connections: set[Connection] = set()
        self._parked: Parked[Connection] = Parked()
        # Connections with a whole request in the inbox, to be served in the next turn.
        self._queue: dict[Connection, None] = {}
        self._held = 0
        self._max_held = max_held
        self._closing = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="allstep-store", daemon=True)
        self._thread.start()

    # What the owning process itself may do, from any thread.

    @property
    def failure(self) -> str | None:
        """Why the thread has ended by itself; None while it serves and after `close()`."""
        if self._failure is None and not self._closing and not self._thread.is_alive():
            return "its thread is gone"
        return self._failure

    def set(self, key: str, value: bytes) -> None:
        """Set a key and wake the requests that wait for it."""
        with self._lock:
            self._table.set_by_owner(key.encode(), value)
        self._wake()

    def peek(self, key: str) -> bytes | None:
        """The value of a key now, or None."""
        with self._lock:
            value = self._table.values.get(key.encode())
        return None if value is None else bytes(value)

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, in order."""
        with self._lock:
            found = self._table.keys(prefix.encode())
        return sorted(key.decode() for key in found)

    def close(self) -> None:
        """Stop serving; clients see their connection end."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._thread.join(timeout=5)
            # On a machine that stood still the thread still needs them to notice the end. Closed
            # here and not in the thread: a client may wake it, so that it has ended before we send.
            if not self._thread.is_alive():
                for end in (self._wake_out, self._wake_in):
                    end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        # Full: the thread is about to wake anyway. Gone: it has ended, and `failure` says so.
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            # Kept, not raised: a traceback would end nothing, and the owner reports it.
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._end()

    def _turn(self) -> None:
        """Wait, then serve each connection that has something once at most."""
        queued = list(self._queue) if self._queue else ()
        self._door.turn(0.0 if queued else self._parked.next_deadline)
        for connection in queued:
            self._guarded(self._serve, connection)
        # Without the lock: a key that the owner sets now wakes the next turn.
        if self._table.appeared:
            self._wake_those_that_wait()
        if self._parked:
            for connection in self._parked.overdue(time.monotonic()):
                self._guarded(self._look_again, connection)

    def _wake_those_that_wait(self) -> None:
        with self._lock:
            appeared = self._table.take_appeared()
        for key in appeared:
            for connection in self._parked.waiting_for(key):
                self._guarded(self._look_again, connection)

    def _end(self) -> None:
        """Close everything but the pair that wakes us, so that each client notices."""
        self._door.close()
        for connection in self._connections:
            connection.sock.close()
        self._selector.close()

    def _woken(self, _: int) -> None:
        self._wake_in.recv(4096)

    def _admit(self, sock: socket.socket, _: bytes) -> None:
        connection = Connection(sock)
        self._connections.add(connection)
        self._guarded(self._settle, connection)

    def _guarded(self, step: Callable[..., None], connection: Connection, *more: int) -> None:
        """Take a step for one connection. What goes wrong in it ends this one and no other."""
        if connection not in self._connections:
            return
        try:
            step(connection, *more)
        except Exception:
            self._drop(connection)

    def _move(self, connection: Connection, events: int) -> None:
        """Send and receive, and serve a request that has come."""
        if events & selectors.EVENT_WRITE:
            connection.flush()
        # One that is in the queue is served from there; what else it has sent stays in the kernel.
        if events & selectors.EVENT_READ and connection not in self._queue:
            if not connection.receive():
                raise ConnectionError("the client is gone")
            if self._is_free(connection) and connection.has_frame():
                self._request(connection, connection.take_frame())
        self._settle(connection)

    def _serve(self, connection: Connection) -> None:
        """Serve the next request of a connection from the queue."""
        if connection in self._queue and self._is_free(connection):
            self._request(connection, connection.take_frame())
        self._settle(connection)

    def _is_free(self, connection: Connection) -> bool:
        """Whether its next request may be served: the last is answered, and replies are read."""
        return connection not in self._parked and len(connection.outbox) <= _FULL_OUTBOX

    def _settle(self, connection: Connection) -> None:
        """After a step: decide what to wait for next at this connection."""
        # The usual end of a request: nothing is left here, and nothing was before.
        if connection.is_idle and connection not in self._parked and connection not in self._queue:
            return
        has_frame, is_free = connection.has_frame(), self._is_free(connection)
        if has_frame and is_free:
            self._queue[connection] = None
        else:
            self._queue.pop(connection, None)
        if connection in self._parked and len(connection.inbox) > _MAX_BEHIND_PARKED:
            raise ValueError(f"{len(connection.inbox)} bytes sent while a request waits")
        # A parked connection is read, so that its end is noticed.
        reads = is_free or connection in self._parked
        writes = bool(connection.outbox)
        self._listen(connection, reads * selectors.EVENT_READ | writes * selectors.EVENT_WRITE)
        self._count(connection)

    def _listen(self, connection: Connection, events: int) -> None:
        if events == connection.events:
            return
        change = self._selector.modify if connection.events else self._selector.register
        change(connection.sock, events, functools.partial(self._guarded, self._move, connection))
        connection.events = events

    def _count(self, connection: Connection) -> None:
        """Count the bytes that this connection holds; drop the slowest when all hold too many."""
        waiting = connection.request_nbytes if connection in self._parked else 0
        held = len(connection.inbox) + len(connection.outbox) + waiting
        if held == connection.held:
            return
        if connection.held <= _MUCH_HELD < held:
            connection.held_since = time.monotonic()
        self._held += held - connection.held
        connection.held = held
        while self._held > self._max_held:
            much = [each for each in self._connections if each.held > _MUCH_HELD]
            if not much:
                return
            self._drop(min(much, key=lambda each: each.held_since))

    def _request(self, connection: Connection, body: bytes) -> None:
        connection.request_nbytes = len(body)
        operation, *arguments = unpack(body, _MAX_FIELDS)
        if operation in (b"get", b"wait"):
            self._respond(connection, self._wait, connection, operation, *arguments)
        else:
            self._respond(connection, self._execute, operation, arguments)

    def _respond(self, connection: Connection, work: Callable[..., _Reply], *given: object) -> None:
        """Reply with what `work` returns, or with why it refuses; None is no reply yet."""
        try:
            reply = work(*given)
        except (TypeError, ValueError) as error:
            reply = [b"bad", str(error).encode()]
        if reply is not None:
            connection.send(pack(reply))

    def _execute(self, operation: bytes, arguments: Fields) -> Fields:
        method: Callable[..., Fields] = getattr(self._table, _name(operation))
        with self._lock:
            return [b"ok", *method(*arguments)]

    def _wait(self, connection: Connection, kind: bytes, seconds: bytes, *keys: bytes) -> _Reply:
        request = Request(keys, kind == b"get", time.monotonic() + _seconds(seconds))
        return self._answer(connection, request)

    def _look_again(self, connection: Connection) -> None:
        """Answer a parked request, or park it again."""
        request = self._parked.take(connection)
        if request is not None:
            self._respond(connection, self._answer, connection, request)
            self._settle(connection)

    def _answer(self, connection: Connection, request: Request) -> _Reply:
        """The reply to a `get` or `wait` that is fulfilled or out of time; else park it."""
        with self._lock:
            values = self._table.values
            missing = request.missing(values)
            if missing is None:
                return [b"ok", *(self._table.get(request.keys) if request.wants_values else [])]
            if time.monotonic() < request.deadline:
                self._parked.park(connection, request, missing)
                return None
            return [b"late", *(key for key in request.keys if key not in values)]

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._parked.take(connection)
        self._queue.pop(connection, None)
        self._held -= connection.held
        connection.held = 0
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()


def _name(operation: bytes) -> str:
    name = operation[:_MAX_WORD].decode()
    if name not in _AT_ONCE:
        raise ValueError(f"no operation {name!r}")
    return name


def _seconds(text: bytes) -> float:
    if len(text) > _MAX_WORD:
        raise ValueError(f"a timeout of {len(text)} digits")
    return checked(float(text))
