"""The launcher's small key-value store: how ranks find each other and leave word for each other.

It lives in the launcher, so any rank may die, rank 0 included. It holds a few kilobytes: addresses, who has turned up, why a run
failed; gradients never pass through it. There is no pickle and no torch in it: keys are text, values are bytes.

On the wire a message is a frame of fields::

    frame = length (4 bytes, network order) | field | field ...        length counts everything behind itself
    field = length (4 bytes)                | bytes

A connection starts with a challenge: the server sends 32 random bytes, the client answers with HMAC-SHA256(token, challenge). The
token itself is never sent, and a stranger that connects gets nothing. Then requests and replies alternate::

    request = operation | argument ...          reply = "ok" | value ...     or     "late" | the keys that did not come

A `get` or `wait` for a key that is not there is parked in the server until somebody sets it or its time runs out: nobody polls.
One client is one process; each of its threads has a connection of its own, so that one that waits holds up no other.
"""

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Self

_LENGTH = struct.Struct("!I")
_MAX_FRAME = 64 << 20
_MAX_GREETING = 64  # what a connection that has not shown the token may send
_CHALLENGE = 32

Fields = list[bytes]


def new_token() -> str:
    """A fresh secret for one run."""
    return secrets.token_hex(16)


def pack(fields: Iterable[bytes]) -> bytes:
    """The frame that carries these fields."""
    body = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Fields:
    """The fields of a frame's body; ValueError when the lengths do not add up."""
    fields, at = [], 0
    while at < len(body):
        if at + 4 > len(body):
            raise ValueError(f"a field's length is cut off at byte {at} of {len(body)}")
        end = at + 4 + _LENGTH.unpack_from(body, at)[0]
        if end > len(body):
            raise ValueError(f"a field ends at byte {end} of {len(body)}")
        fields.append(body[at + 4 : end])
        at = end
    return fields


def _proof(token: str, challenge: bytes) -> bytes:
    return hmac.digest(token.encode(), challenge, "sha256")


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
        self.challenge = secrets.token_bytes(_CHALLENGE)
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
            size = _LENGTH.unpack_from(self.inbox)[0]
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
    """

    def __init__(self, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self._token = token
        self._table = Table()
        self._lock = threading.Lock()
        self._listener = _listen(host, port)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread.

    def _serve(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._patience()):
                key.data(key.fileobj, events)
            with self._lock:
                self._answer_waiting()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._wake_out.close()

    def _patience(self) -> float | None:
        """Seconds until the first parked request runs out of time."""
        if not self._waiting:
            return None
        return max(0.0, min(connection.deadline for connection in self._waiting) - time.monotonic())

    def _woken(self, sock: socket.socket, _: int) -> None:
        sock.recv(4096)

    def _accept(self, listener: socket.socket, _: int) -> None:
        try:
            sock, _address = listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock)
        connection.outbox += connection.challenge
        self._selector.register(sock, selectors.EVENT_READ, lambda _, events: self._ready(connection, events))
        self._send(connection)

    def _ready(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not self._receive(connection):
                return self._drop(connection)
            if events & selectors.EVENT_WRITE:
                self._send(connection)
        except (OSError, ValueError):
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
                if not hmac.compare_digest(body, _proof(self._token, connection.challenge)):
                    raise ValueError("wrong token")
                connection.trusted = True
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
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()


def _listen(host: str, port: int) -> socket.socket:
    if host:
        return socket.create_server((host, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=1024)


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """`10.0.0.1:4567,[fe80::1]:4567` as pairs of host and port."""
    pairs = []
    for item in text.split(","):
        host, _, port = item.strip().rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{item!r} is not HOST:PORT")
        pairs.append((host.strip("[]"), int(port)))
    return pairs


def format_addresses(pairs: Iterable[tuple[str, int]]) -> str:
    """The inverse of `parse_addresses`."""
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in pairs)


class Client:
    """A process's access to the store. The server may be known under several addresses: the first that answers is taken.

    Raises ConnectionError when none can be reached in `timeout` seconds or the store goes away, PermissionError when it does not
    accept the token, TimeoutError (with `keys`) when a key does not come.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], token: str, timeout: float = 30.0) -> None:
        self._addresses = list(addresses)
        self._token = token
        self._timeout = timeout
        self._local = threading.local()
        self._socket()

    @property
    def local_address(self) -> str:
        """The address of ours that routes to the store."""
        return plain_address(self._socket().getsockname()[0])

    @property
    def server_address(self) -> tuple[str, int]:
        """The address at which the store answered."""
        name = self._socket().getpeername()
        return plain_address(name[0]), name[1]

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """The value of a key, as soon as it is there."""
        return self._ask_and_wait("get", [key], timeout)[0]

    def get_all(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """The values of several keys, as soon as all are there."""
        return self._ask_and_wait("get", keys, timeout)

    def wait(self, keys: Sequence[str], timeout: float) -> None:
        """Return when all keys are there."""
        self._ask_and_wait("wait", keys, timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, b"%d" % amount)[0])

    def append(self, key: str, value: bytes) -> None:
        self._ask("append", key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._ask("compare_set", key, expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", *keys) == [b"1"]

    def delete(self, key: str) -> bool:
        return self._ask("delete", key) == [b"1"]

    def count(self) -> int:
        return int(self._ask("count")[0])

    def keys(self, prefix: str = "") -> list[str]:
        return [key.decode() for key in self._ask("keys", prefix)]

    def close(self) -> None:
        """End this thread's connection."""
        sock = getattr(self._local, "sock", None)
        if sock is not None:
            sock.close()
            self._local.sock = None

    def _ask_and_wait(self, operation: str, keys: Sequence[str], timeout: float) -> Fields:
        return self._ask(operation, b"%f" % timeout, *keys, patience=timeout + 10.0)

    def _ask(self, operation: str, *arguments: str | bytes, patience: float = 30.0) -> Fields:
        sock = self._socket()
        fields = [item.encode() if isinstance(item, str) else item for item in (operation, *arguments)]
        try:
            sock.settimeout(patience)
            sock.sendall(pack(fields))
            status, *values = unpack(_receive_frame(sock))
        except (
            BaseException
        ) as error:  # a reply may be under way: this connection can no longer be trusted to alternate
            self.close()
            if isinstance(error, OSError):
                raise ConnectionError(f"the store at {format_addresses(self._addresses)} is gone: {error}") from error
            raise
        if status == b"late":
            raise KeysLate([key.decode() for key in values])
        if status == b"bad":
            raise ValueError(f"the store refused {operation}: {values[0].decode()}")
        return values

    def _socket(self) -> socket.socket:
        """This thread's connection; a new one after a fork, since two processes cannot share one."""
        sock: socket.socket | None = getattr(self._local, "sock", None)
        if sock is None or self._local.pid != os.getpid():
            sock = self._connect()
            self._local.sock, self._local.pid = sock, os.getpid()
        return sock

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._timeout
        each = self._timeout if len(self._addresses) == 1 else min(self._timeout, 3.0)
        while True:
            reasons = []
            for address in self._addresses:
                try:
                    return _greet(address, self._token, each)
                except PermissionError:
                    raise
                except OSError as error:
                    reasons.append(f"{format_addresses([address])}: {error}")
            if time.monotonic() + 0.1 > deadline:
                raise ConnectionError(f"no store within {self._timeout:.0f} s at {'; '.join(reasons)}")
            time.sleep(0.1)


class KeysLate(TimeoutError):
    """Keys that nobody set in time."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(f"nobody set {', '.join(keys)} in time")
        self.keys = keys


def _greet(address: tuple[str, int], token: str, timeout: float) -> socket.socket:
    sock = socket.create_connection(address, timeout=timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        proof = _proof(token, _receive(sock, _CHALLENGE))
        sock.sendall(_LENGTH.pack(len(proof)) + proof)
        try:
            _receive_frame(sock)
        except ConnectionError as error:
            raise PermissionError(f"the store at {format_addresses([address])} does not accept our token") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _receive_frame(sock: socket.socket) -> bytes:
    return _receive(sock, _LENGTH.unpack(_receive(sock, 4))[0])


def _receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise ConnectionError(f"the connection ended after {len(data)} of {size} bytes")
        data += chunk
    return bytes(data)


def plain_address(address: str) -> str:
    """`::ffff:10.0.0.1` is how a dual-stack socket spells 10.0.0.1."""
    return address.removeprefix("::ffff:")
