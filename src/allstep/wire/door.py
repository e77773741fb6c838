"""A listener that lets in only peers that prove the token, and blocks on none of them.

A handshake that stops halfway is state of its connection, and the listener is non-blocking. When
there is no room for another connection (too many strangers, or no file descriptor left) the oldest
stranger is closed, or the listener is ignored for a moment; peers that have been let in notice
neither. The rules are in `strangers`, the proofs in `handshake`.

The owner has a selector whose entries carry a function of the events; `turn` waits and calls them::

    door = Door(listener, token, selector, admit)
    while ...:
        door.turn(until)           # admit(sock, who) has been called for each peer that was let in
"""

import contextlib
import functools
import selectors
import socket
import time
from collections.abc import Callable

from allstep.wire.frames import BUSY, LENGTH, pack
from allstep.wire.handshake import MAX_HELLO_BYTES, Challenge
from allstep.wire.patience import HOUR, bounded
from allstep.wire.strangers import GRACE_SECONDS, MOST, SECONDS, Strangers

_NEVER = float("inf")
# What a selector's entry carries: called with the events that are ready.
Ready = Callable[[int], None]


class _Stranger:
    """A connection that has not proved the token yet."""

    def __init__(self, sock: socket.socket, challenge: Challenge) -> None:
        self.sock = sock
        self.challenge = challenge
        self.inbox = bytearray()

    def hello(self) -> bytes | None:
        """The body of its frame once that is whole; ValueError for what no client of ours sends."""
        if len(self.inbox) < LENGTH.size:
            return None
        size = LENGTH.unpack_from(self.inbox)[0]
        if size > MAX_HELLO_BYTES or len(self.inbox) > LENGTH.size + size:
            raise ValueError(f"a greeting of {size} bytes, {len(self.inbox)} came")
        return bytes(self.inbox[LENGTH.size :]) if len(self.inbox) == LENGTH.size + size else None


class Door:
    """Accepts connections on `listener`, which it owns from now on.

    Args:
        admit: called with the socket (non-blocking) of each peer that has proved the token, and
            with what it states about itself. The door does not use that socket again.
        seconds: how long a connection may go without proving the token.
        most: how many such connections may be open.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        selector: selectors.BaseSelector,
        admit: Callable[[socket.socket, bytes], None],
        seconds: float = SECONDS,
        most: int = MOST,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._token = token
        self._selector = selector
        self._admit = admit
        self._strangers: Strangers[_Stranger] = Strangers(seconds, most)
        # When a paused listener is looked at again.
        self._accept_again = _NEVER
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def turn(self, until: float) -> None:
        """Wait until something is ready, at most until then by `time.monotonic()`; handle it."""
        due = min(self._strangers.next_deadline, self._accept_again)
        first = min(until, due)
        # The usual turn has no deadline, and spares the clock.
        ready = self._selector.select(
            HOUR if first == _NEVER else bounded(first - time.monotonic())
        )
        # The listener last: first see which strangers have answered, then make room.
        for key, events in sorted(ready, key=self._is_listener) if len(ready) > 1 else ready:
            key.data(events)
        if due != _NEVER and time.monotonic() >= due:
            self._close_overdue()
            self._resume_accepting()

    def close(self) -> None:
        """Close the listener and all strangers."""
        for stranger in self._strangers.all():
            self._drop(stranger)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()

    def _is_listener(self, item: tuple[selectors.SelectorKey, int]) -> bool:
        return item[0].fileobj is self._listener

    def _accept(self, _: int) -> None:
        if self._strangers.full and not self._make_room():
            return
        try:
            sock, _address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has hung up
            return
        except OSError:  # out of file descriptors (EMFILE, ENFILE) or of memory
            self._make_room()
            return
        self._greet(_Stranger(sock, Challenge(self._token, self.port)))

    def _make_room(self) -> bool:
        """Close the oldest stranger. Without one that is old enough, pause and return False."""
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
            self._accept_again = _NEVER
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _greet(self, stranger: _Stranger) -> None:
        """Send the challenge; from now on its time runs."""
        self._strangers.add(stranger, time.monotonic())
        try:
            stranger.sock.setblocking(False)
            stranger.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ready = functools.partial(self._receive, stranger)
            self._selector.register(stranger.sock, selectors.EVENT_READ, ready)
            # The first bytes of a connection always fit into the kernel's buffer.
            stranger.sock.send(stranger.challenge.nonce)
        except OSError:  # the peer has hung up
            self._drop(stranger)

    def _receive(self, stranger: _Stranger, _: int) -> None:
        try:
            data = stranger.sock.recv(2 * MAX_HELLO_BYTES)
            stranger.inbox += data
            if not data:
                self._drop(stranger)
            elif (hello := stranger.hello()) is not None:
                self._let_in(stranger, hello)
        except BlockingIOError:
            return
        except Exception:  # gone, not one of ours, or the wrong token: the end of this one only
            self._drop(stranger)

    def _let_in(self, stranger: _Stranger, hello: bytes) -> None:
        who, reply = stranger.challenge.check(hello)
        stranger.sock.send(reply)
        self._strangers.discard(stranger)
        self._selector.unregister(stranger.sock)
        self._admit(stranger.sock, who)

    def _close_overdue(self) -> None:
        for stranger in self._strangers.overdue(time.monotonic()):
            self._send_away(stranger)

    def _send_away(self, stranger: _Stranger) -> None:
        """Close a stranger. The frame makes a genuine but slow client connect again."""
        with contextlib.suppress(OSError):
            stranger.sock.send(pack([BUSY]))
        self._drop(stranger)

    def _drop(self, stranger: _Stranger) -> None:
        self._strangers.discard(stranger)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stranger.sock)
        stranger.sock.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; host "" for every interface, of IPv4 and IPv6."""
    if host:
        return socket.create_server((host, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        six = socket.AF_INET6
        return socket.create_server(("::", port), family=six, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=1024)
