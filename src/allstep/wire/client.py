"""The client of the store: one per process, with one connection per thread."""

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence

from allstep.wire.frames import (
    LENGTH,
    MAX_FRAME,
    Fields,
    format_addresses,
    is_loopback,
    pack,
    plain_address,
    receive_reply,
    unpack,
)
from allstep.wire.handshake import Busy, WrongToken, introduce
from allstep.wire.signatures import TAG_NBYTES, Signatures
from allstep.wire.tickets import TicketRefused
from allstep.wire.timeouts import HOUR, bounded, checked


class KeysLate(TimeoutError):
    """A `get` or `wait` timed out; `keys` lists the keys that are not set."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(f"timed out waiting for keys that are not set: {', '.join(keys)}")
        self.keys = keys


class WaitEnded(RuntimeError):
    """The key that ends a `get` or `wait` (`unless`) is set; `value` is its value."""

    def __init__(self, key: str, value: bytes) -> None:
        super().__init__(f"the wait ended, because the key {key} is set")
        self.value = value


class Client:
    """A process's access to the store.

    `addresses` may list several (host, port) pairs of one server: the client uses the first that
    answers. `token` is the secret of the run. `timeout` is the number of seconds to wait for a
    first connection (default 30). `ticket` is that of a worker of an elastic run.

    Raises ConnectionError if no address answers within `timeout` seconds or the store ends,
    PermissionError if the server rejects the token or cannot prove that it knows it, TicketRefused
    if it does not admit the ticket, and KeysLate (a TimeoutError with `keys`) if a key is not set
    in time.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        token: str,
        timeout: float = 30.0,
        ticket: str = "",
    ) -> None:
        self._addresses = list(addresses)
        self._token = token
        self._ticket = ticket
        self._timeout = checked(timeout)
        self._local = threading.local()
        # The connections of all threads.
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._abandoned = False
        self._was_connected = False
        self._socket()
        self._was_connected = True

    @property
    def local_address(self) -> str:
        """Return the address of this host that routes to the store."""
        return plain_address(self._socket().getsockname()[0])

    @property
    def server_address(self) -> tuple[str, int]:
        """Return the address at which the store answered."""
        return _peer_of(self._socket())

    @property
    def access(self) -> tuple[tuple[str, int], str, str]:
        """What another process of this host needs to connect: address, token and ticket."""
        return self.server_address, self._token, self._ticket

    def set(self, key: str, value: bytes) -> None:
        """Set a key, and replace its value if it has one."""
        self._request("set", key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """Wait until a key is set, at most `timeout` seconds (KeysLate), and return its value."""
        return self._request_and_wait("get", [key], timeout)[0]

    def get_all(
        self, keys: Sequence[str], timeout: float, unless: str | None = None
    ) -> list[bytes]:
        """Wait until all keys are set, at most `timeout` seconds, and return their values.

        unless: a key that ends the wait with WaitEnded if it is set before the others are.
        """
        return self._request_and_wait("get", keys, timeout, unless)

    def wait(self, keys: Sequence[str], timeout: float, unless: str | None = None) -> None:
        """Wait until all keys are set, at most `timeout` seconds (KeysLate).

        unless: as for `get_all`.
        """
        self._request_and_wait("wait", keys, timeout, unless)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter of 64 bits, which starts at 0, and return its new value."""
        return int(self._request("add", key, b"%d" % amount)[0])

    def append(self, key: str, value: bytes) -> None:
        """Append to the value of a key; set it if it is absent."""
        self._request("append", key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key to `desired` if its value is `expected`, and return its value afterwards.

        As in torch's stores, an absent key equals an empty `expected`.
        """
        return self._request("compare_set", key, expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set now."""
        return self._request("check", *keys) == [b"1"]

    def delete(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        return self._request("delete", key) == [b"1"]

    def count(self) -> int:
        """Return the number of keys."""
        return int(self._request("count")[0])

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        return sorted(key.decode() for key in self._request("keys", prefix))

    def close(self) -> None:
        """Close this thread's connection; the next request opens another."""
        sock = getattr(self._local, "sock", None)
        if sock is not None:
            sock.close()
            self._local.sock = None

    def close_all(self) -> None:
        """Close the connections of all threads permanently."""
        self.abandon()
        for sock in list(self._open):
            sock.close()

    def abandon(self) -> None:
        """Raise ConnectionError now in every thread that waits for the store, and in later calls.

        No thread connects again.
        """
        self._abandoned = True
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _request_and_wait(
        self, operation: str, keys: Sequence[str], timeout: float, unless: str | None = None
    ) -> Fields:
        """Wait for keys in requests of at most an hour, which the timers of both kernels can count.

        The socket's timeout is 10 s longer than the request's, so that the reply "late" arrives.
        """
        ending = [] if unless is None else [unless]
        operation = f"{operation}_unless" if ending else operation
        end = time.monotonic() + checked(timeout)
        while (left := end - time.monotonic()) > HOUR:
            with contextlib.suppress(KeysLate):
                return self._request(operation, *ending, b"%f" % HOUR, *keys, timeout=HOUR + 10.0)
        limit = max(0.0, left) + 10.0
        return self._request(operation, *ending, b"%f" % left, *keys, timeout=limit)

    def _request(self, operation: str, *arguments: str | bytes, timeout: float = 30.0) -> Fields:
        """Send a request and return the values of its reply; `timeout` is the socket's, in seconds.

        Raises KeysLate, WaitEnded and ValueError for replies with that status, ConnectionError for
        a lost store.
        """
        status, *values = self._exchange(_frame(operation, arguments), timeout)
        if status == b"late":
            raise KeysLate([key.decode() for key in values])
        if status == b"ended":
            raise WaitEnded(str(arguments[0]), values[0])
        if status == b"bad":
            raise ValueError(f"the store refused {operation}: {values[0].decode()}")
        return values

    def _exchange(self, frame: bytes, timeout: float) -> Fields:
        """Send a frame and return the fields of the reply."""
        sock = self._socket()
        try:
            # settimeout is a system call, and most requests have the same timeout.
            if sock.gettimeout() != timeout:
                sock.settimeout(timeout)
            signatures: Signatures | None = self._local.signatures
            if signatures is None:
                sock.sendall(frame)
                return unpack(receive_reply(sock))
            sock.sendall(signatures.sent.sign(frame))
            reply = receive_reply(sock, MAX_FRAME + TAG_NBYTES)
            return unpack(signatures.received.check(reply))
        # A reply may still be in flight, so requests and replies no longer alternate here.
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConnectionError(
                    f"the store at {format_addresses(self._addresses)} is gone: {error}"
                ) from error
            raise

    def _socket(self) -> socket.socket:
        """Return this thread's connection, opened if needed.

        A forked process opens a new one, since two processes cannot share a connection.
        """
        sock: socket.socket | None = getattr(self._local, "sock", None)
        if sock is None or self._local.pid != os.getpid():
            sock, self._local.signatures = self._connect()
            self._local.sock, self._local.pid = sock, os.getpid()
            self._open.add(sock)
        return sock

    def _connect(self) -> tuple[socket.socket, Signatures | None]:
        """Open an authenticated connection to the first address that answers."""
        if self._abandoned:
            raise ConnectionError("this process has abandoned the store")
        started, busy = time.monotonic(), False
        each = bounded(self._timeout if len(self._addresses) == 1 else min(self._timeout, 3.0))
        while True:
            reasons = []
            for address in self._addresses:
                try:
                    opened = _open_connection(address, self._token, self._ticket, each)
                except WrongToken:
                    if len(self._addresses) == 1:
                        raise
                    reasons.append(f"{format_addresses([address])}: the store of another run")
                # The store has proved the token, and will not change its mind.
                except TicketRefused:
                    raise
                # UnicodeError: a host name that cannot be looked up, such as "a..b".
                except (OSError, UnicodeError) as error:
                    busy = isinstance(error, Busy)
                    reasons.append(f"{format_addresses([address])}: {error}")
                else:
                    # Further threads need not try the other addresses.
                    self._addresses = [address]
                    return opened
            # A store that was connected before and no longer listens will not come back. Retry
            # only the first connection, and a store that is busy with unauthenticated peers.
            timeout = 0.0 if self._was_connected and not busy else self._timeout
            if time.monotonic() + 0.05 > started + timeout:
                more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
                raise ConnectionError(
                    f"no store within {self._timeout:.0f} s at {'; '.join(reasons[:3])}{more}"
                )
            time.sleep(0.05)


def find_address(
    addresses: Sequence[tuple[str, int]], token: str, timeout: float
) -> tuple[str, int]:
    """Return the first address at which the store answers and proves the token.

    It need not admit this process. Raises what `Client` raises.
    """
    try:
        client = Client(addresses, token, timeout)
    except TicketRefused as refused:
        return refused.address
    found = client.server_address
    client.close()
    return found


def _frame(operation: str, arguments: Sequence[str | bytes]) -> bytes:
    """Return the frame of a request; ValueError if it is longer than the store accepts."""
    fields = [item.encode() if isinstance(item, str) else item for item in (operation, *arguments)]
    frame = pack(fields)
    if (nbytes := len(frame) - LENGTH.size) > MAX_FRAME:
        raise ValueError(f"{operation} of {nbytes} bytes: the store accepts at most {MAX_FRAME}")
    return frame


def _peer_of(sock: socket.socket) -> tuple[str, int]:
    host, port, *_ = sock.getpeername()
    return plain_address(host), port


def _open_connection(
    address: tuple[str, int], token: str, ticket: str, timeout: float
) -> tuple[socket.socket, Signatures | None]:
    """Connect and run the client's side of the handshake, within `timeout` seconds."""
    started = time.monotonic()
    sock = socket.create_connection(address, timeout=timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        left, signs = timeout - (time.monotonic() - started), not is_loopback(sock.getpeername()[0])
        return sock, introduce(sock, token, left, ticket=ticket, signs=signs)
    except TicketRefused as refused:
        refused.address = _peer_of(sock)
        sock.close()
        raise
    except WrongToken as error:
        sock.close()
        raise WrongToken(f"the store at {format_addresses([address])}: {error}") from error
    except BaseException:
        sock.close()
        raise
