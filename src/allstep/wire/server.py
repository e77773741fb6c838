"""The server of the store: a table, and a thread that serves it.

The thread runs one loop and never blocks on a single client. `Acceptor` authenticates clients,
`Table` holds the values, `WaitingRequests` holds the requests that wait for keys. This module
schedules the connections and drops faulty ones:

* Each iteration of the loop serves one request per connection. A client that has sent 10,000
  requests at once delays the others by one of its requests each time.
* The server stops reading from a client that has more than 1 MB of unread replies.
* The bytes that all connections hold, received and unsent, are bounded (512 MB). Beyond that the
  connection that has held many for the longest time is dropped: it neither finishes its request nor
  reads its reply.
* In an elastic run only clients with a ticket are served (`tickets`): the connections of a revoked
  one are closed, and a worker cannot write what belongs to the launcher or to another worker.
* An error while one connection is served ends that connection only. If the thread itself ends, all
  connections end with it and `failure` has the reason.
"""

import contextlib
import functools
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from allstep.wire.acceptor import Acceptor, listen
from allstep.wire.connection import Connection
from allstep.wire.frames import Fields, pack, unpack
from allstep.wire.handshake import Admitted
from allstep.wire.key_table import MAX_NBYTES, Table
from allstep.wire.subscription import Subscription
from allstep.wire.tickets import Tickets, may_write
from allstep.wire.timeouts import checked
from allstep.wire.unauthenticated import AUTH_SECONDS, MAX_OPEN
from allstep.wire.waiting import Request, WaitingRequests

_Reply = Fields | None
_AT_ONCE = ("set", "add", "append", "compare_set", "check", "delete", "count", "keys")
_WRITES = frozenset((b"set", b"add", b"append", b"compare_set", b"delete"))
# Upper limit of a request's keys; a frame of 64 MB has room for millions of empty ones.
_MAX_FIELDS = 1 << 16
# Bytes of unread replies from which on a client's next request is not served.
_FULL_OUTBOX = 1 << 20
# Upper limit of the bytes sent behind a waiting request. allstep's clients send nothing there: they
# wait for the reply before they send again.
_MAX_BEHIND_WAITING = 1 << 18
# Upper limit of the characters of a number or of an operation's name.
_MAX_TEXT = 40
_MAX_HELD = 512 << 20
# Dropping a connection that holds fewer bytes than this would not help.
_MUCH_HELD = 1 << 18


class Server:
    """The server of the store, in a thread of this process until `close()`.

    token: the secret that clients must prove to know.
    host: address to listen on: "127.0.0.1" (default) if all ranks are on this host, "" for every
        interface.
    port: port to listen on; 0 (default) for a free one. The attribute `port` has the result.
    auth_seconds: seconds in which a connection must prove the token.
    max_unauthenticated: upper limit of connections that have not proved the token.
    max_nbytes: upper limit of the bytes of all keys and values.
    max_held: upper limit of the bytes of requests and replies in flight.
    tickets: serve only clients that have one of these; None (default) for all that know the token.
    """

    def __init__(
        self,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        auth_seconds: float = AUTH_SECONDS,
        max_unauthenticated: int = MAX_OPEN,
        max_nbytes: int = MAX_NBYTES,
        max_held: int = _MAX_HELD,
        tickets: Tickets | None = None,
    ) -> None:
        self._table = Table(max_nbytes)
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._tickets = tickets
        parts = listen(host, port), token, self._selector, self._admit
        limits = auth_seconds, max_unauthenticated
        self._acceptor = Acceptor(*parts, *limits, tickets=tickets, signs=True)
        self.port = self._acceptor.port
        self._wake_out, self._wake_in = socket.socketpair()
        # A send that would block is not needed: the bytes that fill the pipe wake the thread too.
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)
        self._connections: set[Connection] = set()
        self._waiting: WaitingRequests[Connection] = WaitingRequests()
        self._subscriptions: list[Subscription] = []
        # Connections with a whole request in the inbox, to be served in the next iteration.
        self._queue: dict[Connection, None] = {}
        self._held = 0
        self._max_held = max_held
        self._closing = False
        self._failure: str | None = None
        if tickets is not None:
            tickets.on_revoked = self._wake
        self._thread = threading.Thread(target=self._run, name="allstep-store", daemon=True)
        self._thread.start()

    # For the owning process, from any thread.

    @property
    def failure(self) -> str | None:
        """Return why the thread has ended; None while it serves and after `close()`."""
        if self._failure is None and not self._closing and not self._thread.is_alive():
            return "its thread is gone"
        return self._failure

    def set(self, key: str, value: bytes) -> None:
        """Set a key and wake the requests that wait for it."""
        with self._lock:
            self._table.set_by_owner(key.encode(), value)
        self._wake()

    def peek(self, key: str) -> bytes | None:
        """Return the value of a key, or None if it is not set."""
        with self._lock:
            value = self._table.values.get(key.encode())
        return None if value is None else bytes(value)

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        with self._lock:
            found = self._table.keys(prefix.encode())
        return sorted(key.decode() for key in found)

    def delete_prefix(self, prefix: str) -> int:
        """Delete the keys that begin with `prefix`; return how many they were."""
        with self._lock:
            found = [key for key in self._table.values if key.startswith(prefix.encode())]
            for key in found:
                self._table.delete(key)
        return len(found)

    def subscribe(self, prefix: str) -> Subscription:
        """Return a subscription to the keys with a prefix that appear from now on."""
        made = Subscription(prefix)
        self._subscriptions.append(made)
        return made

    def is_connected(self, worker: str) -> bool:
        """Return whether a connection with the ticket of this worker is open."""
        return any(each.worker == worker for each in tuple(self._connections))

    def close(self) -> None:
        """Stop serving; clients see their connection end."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._thread.join(timeout=5)
            # If the machine was suspended, the thread may still need the sockets to notice the end.
            # They are closed here and not in the thread: a client may wake it, so that it has ended
            # before `_wake` sends.
            if not self._thread.is_alive():
                self._wake_out.close()
                self._wake_in.close()
                for subscription in self._subscriptions:
                    subscription.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        """Wake the thread from its wait."""
        # A full pipe: the thread is about to wake anyway. A closed one: the thread has ended, which
        # `failure` reports.
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_once()
        except BaseException as error:
            # Stored, not raised: a traceback would not end the run, and the owner reports it.
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._end()

    def _run_once(self) -> None:
        """Wait for events, then serve at most one request of each connection."""
        queued = list(self._queue) if self._queue else ()
        self._acceptor.run_once(0.0 if queued else self._waiting.next_deadline)
        if self._tickets is not None:
            self._close_revoked(self._tickets)
        for connection in queued:
            self._guarded(self._serve, connection)
        # Without the lock: a key that the owner sets now wakes the next iteration.
        if self._table.appeared:
            self._check_waiting()
        if self._waiting:
            for connection in self._waiting.overdue(time.monotonic()):
                self._guarded(self._check_again, connection)

    def _check_waiting(self) -> None:
        """Check the requests that wait for a key which has appeared."""
        with self._lock:
            appeared = self._table.take_appeared()
        for key in appeared:
            for subscription in self._subscriptions:
                subscription.note(key)
            for connection in self._waiting.waiting_for(key):
                self._guarded(self._check_again, connection)

    def _close_revoked(self, tickets: Tickets) -> None:
        """Close the connections of tickets that were revoked."""
        for worker in tickets.take_revoked():
            for connection in [each for each in self._connections if each.worker == worker]:
                self._drop(connection)

    def _end(self) -> None:
        """Close all sockets but the pair that wakes this thread, so that each client notices."""
        self._acceptor.close()
        for connection in self._connections:
            connection.sock.close()
        self._selector.close()

    def _woken(self, _: int) -> None:
        self._wake_in.recv(4096)

    def _admit(self, sock: socket.socket, admitted: Admitted) -> None:
        """Serve an authenticated connection from now on."""
        connection = Connection(sock, admitted.worker, admitted.signatures)
        self._connections.add(connection)
        self._guarded(self._settle, connection)

    def _guarded(self, step: Callable[..., None], connection: Connection, *more: int) -> None:
        """Call `step` for a connection; an error in it ends this connection and no other."""
        if connection not in self._connections:
            return
        try:
            step(connection, *more)
        except Exception:
            self._drop(connection)

    def _move(self, connection: Connection, events: int) -> None:
        """Send and receive, and serve a request that has arrived."""
        if events & selectors.EVENT_WRITE:
            connection.flush()
        # A queued connection is served from the queue; its later bytes stay in the kernel.
        if events & selectors.EVENT_READ and connection not in self._queue:
            if not connection.receive():
                raise ConnectionError("the client closed the connection")
            if self._is_free(connection) and connection.has_frame():
                self._request(connection, connection.take_frame())
        self._settle(connection)

    def _serve(self, connection: Connection) -> None:
        """Serve the next request of a connection from the queue."""
        if connection in self._queue and self._is_free(connection):
            self._request(connection, connection.take_frame())
        self._settle(connection)

    def _is_free(self, connection: Connection) -> bool:
        """Return whether the next request may be served: the last is answered, replies are read."""
        return connection not in self._waiting and len(connection.outbox) <= _FULL_OUTBOX

    def _settle(self, connection: Connection) -> None:
        """Decide, after a step, which events to await at this connection."""
        # The usual case after a request: the buffers are empty and no bytes were counted.
        if connection.is_idle and connection not in self._waiting and connection not in self._queue:
            return
        has_frame, is_free = connection.has_frame(), self._is_free(connection)
        if has_frame and is_free:
            self._queue[connection] = None
        else:
            self._queue.pop(connection, None)
        if connection in self._waiting and len(connection.inbox) > _MAX_BEHIND_WAITING:
            raise ValueError(f"{len(connection.inbox)} bytes sent while a request waits")
        # A connection with a waiting request is read, so that its end is noticed.
        reads = is_free or connection in self._waiting
        writes = bool(connection.outbox)
        self._listen(connection, reads * selectors.EVENT_READ | writes * selectors.EVENT_WRITE)
        self._count(connection)

    def _listen(self, connection: Connection, events: int) -> None:
        """Await `events` at this connection."""
        if events == connection.events:
            return
        change = self._selector.modify if connection.events else self._selector.register
        change(connection.sock, events, functools.partial(self._guarded, self._move, connection))
        connection.events = events

    def _count(self, connection: Connection) -> None:
        """Count the bytes that this connection holds; drop the slowest if all hold too many."""
        waiting = connection.request_nbytes if connection in self._waiting else 0
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
        """Serve one request."""
        connection.request_nbytes = len(body)
        operation, *arguments = unpack(body, _MAX_FIELDS)
        if operation in (b"get", b"wait"):
            self._respond(connection, self._wait, connection, operation, None, *arguments)
        elif operation in (b"get_unless", b"wait_unless"):
            kind = operation.removesuffix(b"_unless")
            self._respond(connection, self._wait, connection, kind, *arguments)
        else:
            self._respond(connection, self._execute, operation, arguments, connection.worker)

    def _respond(self, connection: Connection, work: Callable[..., _Reply], *given: object) -> None:
        """Send what `work` returns, or the reason for which it raises; None sends no reply yet."""
        try:
            reply = work(*given)
        except (TypeError, ValueError) as error:
            reply = [b"bad", str(error).encode()]
        if reply is not None:
            connection.send(pack(reply))

    def _execute(self, operation: bytes, arguments: Fields, worker: str) -> Fields:
        """Run an operation of the table and return its reply."""
        method: Callable[..., Fields] = getattr(self._table, _name(operation))
        if worker and operation in _WRITES and arguments and not may_write(worker, arguments[0]):
            key = arguments[0][:_MAX_TEXT].decode(errors="replace")
            raise ValueError(f"worker {worker} may not write {key!r}")
        with self._lock:
            return [b"ok", *method(*arguments)]

    def _wait(
        self,
        connection: Connection,
        kind: bytes,
        unless: bytes | None,
        seconds: bytes,
        *keys: bytes,
    ) -> _Reply:
        """Return the reply to a new `get` or `wait`, or None if it has to wait."""
        request = Request(keys, kind == b"get", time.monotonic() + _seconds(seconds), unless)
        return self._answer(connection, request)

    def _check_again(self, connection: Connection) -> None:
        """Answer a waiting request, or let it wait again."""
        request = self._waiting.take(connection)
        if request is not None:
            self._respond(connection, self._answer, connection, request)
            self._settle(connection)

    def _answer(self, connection: Connection, request: Request) -> _Reply:
        """Return the reply to a `get` or `wait` that is fulfilled or late; else let it wait."""
        with self._lock:
            values = self._table.values
            missing = request.missing(values)
            if missing is None:
                return [b"ok", *(self._table.get(request.keys) if request.wants_values else [])]
            if request.unless is not None and request.unless in values:
                return [b"ended", *self._table.get((request.unless,))]
            if time.monotonic() < request.deadline:
                self._waiting.add(connection, request, missing)
                return None
            return [b"late", *(key for key in request.keys if key not in values)]

    def _drop(self, connection: Connection) -> None:
        """Close a connection and forget its request."""
        self._connections.discard(connection)
        self._waiting.take(connection)
        self._queue.pop(connection, None)
        self._held -= connection.held
        connection.held = 0
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()


def _name(operation: bytes) -> str:
    """Return the name of an operation that needs no wait; ValueError if there is none."""
    name = operation[:_MAX_TEXT].decode()
    if name not in _AT_ONCE:
        raise ValueError(f"no operation {name!r}")
    return name


def _seconds(text: bytes) -> float:
    """Return the timeout that a request spells; ValueError if it is not a finite number."""
    if len(text) > _MAX_TEXT:
        raise ValueError(f"a timeout of {len(text)} digits")
    return checked(float(text))
