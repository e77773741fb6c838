"""The store itself: a table, and a thread that serves it.

The thread runs one loop and never blocks on a single client: a greeting that stops halfway is state
of its connection, and the listener is non-blocking. When there is no room for another connection (too
many strangers, or no file descriptor left) the loop closes the oldest stranger, or ignores the
listener for a moment; the ranks that have joined notice neither.
"""

import contextlib
import functools
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

from allstep.wire.frames import BUSY, LENGTH, Fields, pack, proof, unpack
from allstep.wire.strangers import GRACE_SECONDS, MOST, SECONDS, Strangers

_MAX_FRAME = 64 << 20
_MAX_GREETING = 64  # what a connection that has not shown the token may send
NUM_CHALLENGE_BYTES = 32


class Table:
    """The keys and values, and what each operation does to them. No sockets here."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def set(self, key: bytes, value: bytes) -> Fields:
        self.values[key] = value
        return []

    def add(self, key: bytes, amount: bytes) -> Fields:
        total = int(self.values.get(key, b"0")) + int(amount)
        self.values[key] = b"%d" % total
        return [self.values[key]]

    def append(self, key: bytes, value: bytes) -> Fields:
        self.values[key] = self.values.get(key, b"") + value
        return []

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Fields:
        """torch's rule: an absent key equals an empty expectation; the reply is what stands there now."""
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return [self.values.get(key, expected)]

    def check(self, *keys: bytes) -> Fields:
        return [b"%d" % all(key in self.values for key in keys)]

    def delete(self, key: bytes) -> Fields:
        return [b"%d" % (self.values.pop(key, None) is not None)]

    def count(self) -> Fields:
        return [b"%d" % len(self.values)]

    def keys(self, prefix: bytes) -> Fields:
        return sorted(key for key in self.values if key.startswith(prefix))


_AT_ONCE = ("set", "add", "append", "compare_set", "check", "delete", "count", "keys")


class _Connection:
    """One client as the server sees it: bytes that came, bytes to go, and the request it waits for."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.challenge = secrets.token_bytes(NUM_CHALLENGE_BYTES)
        self.trusted = False
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.waits_for: tuple[bytes, ...] = ()
        self.wants_values = False
        self.deadline = 0.0

    def frames(self) -> Iterable[bytes]:
        """Whole frames that have come; ValueError for one that nobody honest would send."""
        limit = _MAX_FRAME if self.trusted else _MAX_GREETING
        while len(self.inbox) >= 4:
            size = LENGTH.unpack_from(self.inbox)[0]
            if size > limit:
                raise ValueError(f"a frame of {size} bytes; at most {limit} are taken here")
            if len(self.inbox) < 4 + size:
                return
            body = bytes(self.inbox[4 : 4 + size])
            del self.inbox[: 4 + size]
            yield body


class Server:
    """The store. Runs in a thread of its own process until `close()`; binds port 0 and says what it got in `port`.

    host: "127.0.0.1" when all ranks are on this host, "" for every interface.
    stranger_seconds: how long a connection may go without showing the token.
    max_strangers: how many such connections may be open.
    """

    def __init__(
        self,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        stranger_seconds: float = SECONDS,
        max_strangers: int = MOST,
    ) -> None:
        self._token = token
        self._strangers: Strangers[_Connection] = Strangers(stranger_seconds, max_strangers)
        self._accept_again = float("inf")  # when a paused listener is looked at again
        self._table = Table()
        self._lock = threading.Lock()
        self._listener = _listen(host, port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._closing = False
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)
        self._waiting: set[_Connection] = set()
        self._thread = threading.Thread(target=self._serve, name="allstep-store", daemon=True)
        self._thread.start()

    # What the owning process itself may do, from any thread.

    def set(self, key: str, value: bytes) -> None:
        """Set a key and wake whoever waits for it."""
        with self._lock:
            self._table.set(key.encode(), value)
        self._wake_out.send(b"x")

    def peek(self, key: str) -> bytes | None:
        """The value of a key now, or None."""
        with self._lock:
            return self._table.values.get(key.encode())

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, in order."""
        with self._lock:
            return [key.decode() for key in self._table.keys(prefix.encode())]

    def close(self) -> None:
        """Stop serving; clients see their connection end."""
        if not self._closing:
            self._closing = True
            self._wake_out.send(b"x")
            self._thread.join(timeout=5)
            if (
                not self._thread.is_alive()
            ):  # a machine that stood still: the thread still needs them to hear of the end
                for end in (self._wake_out, self._wake_in):  # here, not in the thread: a client may wake it, so that it
                    end.close()  # is gone before we send

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread.

    def _serve(self) -> None:
        while not self._closing:
            ready = self._selector.select(self._patience())
            # The listener last: first see which strangers have answered, then make room.
            for key, events in sorted(ready, key=lambda item: item[0].fileobj is self._listener):
                key.data(key.fileobj, events)
            self._close_overdue_strangers()
            self._resume_accepting()
            with self._lock:
                self._answer_waiting()
        self._selector.unregister(self._wake_in)
        self._listener.close()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _patience(self) -> float | None:
        """Seconds until something is due by the clock: a parked request, a stranger, a pause."""
        requests = min((connection.deadline for connection in self._waiting), default=float("inf"))
        due = min(requests, self._strangers.next_deadline, self._accept_again)
        return None if due == float("inf") else max(0.0, due - time.monotonic())

    def _woken(self, sock: socket.socket, _: int) -> None:
        sock.recv(4096)

    def _accept(self, listener: socket.socket, _: int) -> None:
        if self._strangers.full and not self._make_room():
            return
        try:
            sock, _address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has hung up
            return
        except OSError:  # out of file descriptors (EMFILE, ENFILE) or of memory
            self._make_room()
            return
        self._greet(_Connection(sock))

    def _make_room(self) -> bool:
        """Close the oldest stranger. Where all are fresh, or none is there, pause and return False."""
        now = time.monotonic()
        oldest = self._strangers.replaceable(now)
        if oldest is not None:
            self._send_away(oldest)
            return True
        self._selector.unregister(self._listener)
        self._accept_again = now + GRACE_SECONDS
        return False

    def _resume_accepting(self) -> None:
        if time.monotonic() >= self._accept_again:
            self._accept_again = float("inf")
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _greet(self, connection: _Connection) -> None:
        """Send the challenge; from now on its time runs."""
        self._strangers.add(connection, time.monotonic())
        connection.outbox += connection.challenge
        try:
            connection.sock.setblocking(False)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ready = functools.partial(self._ready, connection)
            self._selector.register(connection.sock, selectors.EVENT_READ, ready)
            self._send(connection)
        except OSError:  # the peer has hung up
            self._drop(connection)

    def _close_overdue_strangers(self) -> None:
        for connection in self._strangers.overdue(time.monotonic()):
            self._send_away(connection)

    def _send_away(self, stranger: _Connection) -> None:
        """Close a stranger. The frame makes a genuine but slow client connect again."""
        with contextlib.suppress(OSError):
            stranger.sock.send(pack([BUSY]))
        self._drop(stranger)

    def _ready(self, connection: _Connection, _: socket.socket, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not self._receive(connection):
                return self._drop(connection)
            if events & selectors.EVENT_WRITE:
                self._send(connection)
        except (OSError, ValueError, IndexError):  # gone, or a request without the fields that it needs
            self._drop(connection)

    def _receive(self, connection: _Connection) -> bool:
        try:
            data = connection.sock.recv(1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        connection.inbox += data
        for body in connection.frames():
            if not connection.trusted:
                if not hmac.compare_digest(body, proof(self._token, connection.challenge)):
                    raise ValueError("wrong token")
                connection.trusted = True
                self._strangers.discard(connection)
                self._reply(connection, [b"ok"])
            else:
                self._request(connection, unpack(body))
        return True

    def _request(self, connection: _Connection, fields: Fields) -> None:
        operation, arguments = fields[0].decode(), fields[1:]
        if operation in ("get", "wait"):
            connection.deadline = time.monotonic() + float(arguments[0])
            connection.waits_for = tuple(arguments[1:])
            connection.wants_values = operation == "get"
            self._waiting.add(connection)
        elif operation in _AT_ONCE:
            method: Callable[..., Fields] = getattr(self._table, operation)
            with self._lock:
                try:
                    reply = [b"ok", *method(*arguments)]
                except (TypeError, ValueError) as error:
                    reply = [b"bad", str(error).encode()]
            self._reply(connection, reply)
        else:
            self._reply(connection, [b"bad", f"no operation {operation!r}".encode()])

    def _answer_waiting(self) -> None:
        """Reply to the parked requests that are fulfilled or out of time."""
        now = time.monotonic()
        for connection in list(self._waiting):
            values = self._table.values
            missing = [key for key in connection.waits_for if key not in values]
            if missing and now < connection.deadline:
                continue
            self._waiting.discard(connection)
            found = [values[key] for key in connection.waits_for] if connection.wants_values and not missing else []
            try:
                self._reply(connection, [b"late", *missing] if missing else [b"ok", *found])
            except OSError:
                self._drop(connection)

    def _reply(self, connection: _Connection, fields: Fields) -> None:
        connection.outbox += pack(fields)
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            while connection.outbox:
                sent = connection.sock.send(connection.outbox)
                del connection.outbox[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outbox else 0)
        key = self._selector.get_key(connection.sock)
        if key.events != events:
            self._selector.modify(connection.sock, events, key.data)

    def _drop(self, connection: _Connection) -> None:
        self._waiting.discard(connection)
        self._strangers.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()


def _listen(host: str, port: int) -> socket.socket:
    if host:
        return socket.create_server((host, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=1024)
