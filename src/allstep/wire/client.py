"""A process's access to the store."""

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
    pack,
    plain_address,
    receive_reply,
    unpack,
)
from allstep.wire.handshake import Busy, WrongToken, introduce
from allstep.wire.patience import HOUR, bounded, checked


class KeysLate(TimeoutError):
    """Keys that nobody set in time."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(f"nobody set {', '.join(keys)} in time")
        self.keys = keys


class Client:
    """A process's access to the store. The server may be known under several addresses: the first
    that answers is taken.

    Raises ConnectionError when none can be reached in `timeout` seconds or the store goes away,
    PermissionError when it does not accept the token or cannot prove that it knows it, TimeoutError
    (with `keys`) when a key does not come.
    """

    def __init__(
        self, addresses: Sequence[tuple[str, int]], token: str, timeout: float = 30.0
    ) -> None:
        self._addresses = list(addresses)
        self._token = token
        self._timeout = checked(timeout)
        self._local = threading.local()
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # of all threads
        self._abandoned = False
        self._met = False
        self._socket()
        self._met = True

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
        return sorted(key.decode() for key in self._ask("keys", prefix))

    def close(self) -> None:
        """End this thread's connection."""
        sock = getattr(self._local, "sock", None)
        if sock is not None:
            sock.close()
            self._local.sock = None

    def close_all(self) -> None:
        """End the connections of all threads, for good."""
        self.abandon()
        for sock in list(self._open):
            sock.close()

    def abandon(self) -> None:
        """Whoever still waits for the store, in any thread, gets a ConnectionError now, and nobody
        connects again."""
        self._abandoned = True
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _ask_and_wait(self, operation: str, keys: Sequence[str], timeout: float) -> Fields:
        """Ask for an hour at a time, so that no wait is too long for the kernel, here or there."""
        end = time.monotonic() + checked(timeout)
        while (left := end - time.monotonic()) > HOUR:
            with contextlib.suppress(KeysLate):
                return self._ask(operation, b"%f" % HOUR, *keys, patience=HOUR + 10.0)
        return self._ask(operation, b"%f" % left, *keys, patience=max(0.0, left) + 10.0)

    def _ask(self, operation: str, *arguments: str | bytes, patience: float = 30.0) -> Fields:
        sock = self._socket()
        fields = [
            item.encode() if isinstance(item, str) else item for item in (operation, *arguments)
        ]
        frame = pack(fields)
        if (nbytes := len(frame) - LENGTH.size) > MAX_FRAME:
            raise ValueError(
                f"{operation} of {nbytes} bytes: the store takes at most {MAX_FRAME} at a time"
            )
        try:
            # Each call is a system call, and most requests have the same patience.
            if sock.gettimeout() != patience:
                sock.settimeout(patience)
            sock.sendall(frame)
            status, *values = unpack(receive_reply(sock))
        # a reply may be under way: this connection can no longer be trusted to alternate
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConnectionError(
                    f"the store at {format_addresses(self._addresses)} is gone: {error}"
                ) from error
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
            self._open.add(sock)
        return sock

    def _connect(self) -> socket.socket:
        if self._abandoned:
            raise ConnectionError("the store was left: this process ends")
        started, busy = time.monotonic(), False
        each = bounded(self._timeout if len(self._addresses) == 1 else min(self._timeout, 3.0))
        while True:
            reasons = []
            for address in self._addresses:
                try:
                    sock = _greet(address, self._token, each)
                except WrongToken:
                    if len(self._addresses) == 1:
                        raise
                    reasons.append(f"{format_addresses([address])}: somebody else's store")
                # UnicodeError: a host name that cannot be looked up, such as "a..b".
                except (OSError, UnicodeError) as error:
                    busy = isinstance(error, Busy)
                    reasons.append(f"{format_addresses([address])}: {error}")
                else:
                    self._addresses = [address]  # further threads need not search again
                    return sock
            # A store that we knew and that no longer listens will not come back: only the first
            # meeting, and a store that is busy with strangers, are worth waiting for.
            patience = self._timeout if busy or not self._met else 0.0
            if time.monotonic() + 0.05 > started + patience:
                more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
                raise ConnectionError(
                    f"no store within {self._timeout:.0f} s at {'; '.join(reasons[:3])}{more}"
                )
            time.sleep(0.05)


def _greet(address: tuple[str, int], token: str, timeout: float) -> socket.socket:
    """Connect, and prove the token to each other."""
    started = time.monotonic()
    sock = socket.create_connection(address, timeout=timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(sock, token, timeout - (time.monotonic() - started))
    except WrongToken as error:
        sock.close()
        raise WrongToken(f"the store at {format_addresses([address])}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock
