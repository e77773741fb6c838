"""Accepts connections, authenticates each with the token, and blocks on none of them.

An unfinished handshake is state of its connection, and the listening socket is non-blocking. When
there is no room for another connection (too many are unauthenticated, or no file descriptor is
left), the oldest unauthenticated one is closed, or accepting pauses for a moment; authenticated
peers are not affected. The rules are in `unauthenticated`, the proofs in `handshake`.

The owner has a selector whose entries carry a callable that takes the ready events; `run_once`
waits and calls them::

    acceptor = Acceptor(listener, token, selector, admit)
    while ...:
        acceptor.run_once(until)    # calls admit(sock, admitted) for each peer that has proved it
"""

import contextlib
import functools
import selectors
import socket
import time
from collections.abc import Callable

from allstep.wire.frames import BUSY, LENGTH, is_loopback, pack
from allstep.wire.handshake import MAX_HELLO_BYTES, Admitted, Challenge
from allstep.wire.tickets import TicketRefused, Tickets
from allstep.wire.timeouts import HOUR, bounded
from allstep.wire.unauthenticated import AUTH_SECONDS, GRACE_SECONDS, MAX_OPEN, Unauthenticated

_NEVER = float("inf")
# The data of a selector's entry: called with the events that are ready.
Ready = Callable[[int], None]


class _Peer:
    """A connection whose peer has not proved the token yet."""

    def __init__(self, sock: socket.socket, challenge: Challenge) -> None:
        self.sock = sock
        self.challenge = challenge
        self.inbox = bytearray()

    def hello(self) -> bytes | None:
        """Return the body of the hello once it is complete, else None; ValueError if malformed."""
        if len(self.inbox) < LENGTH.size:
            return None
        size = LENGTH.unpack_from(self.inbox)[0]
        if size > MAX_HELLO_BYTES or len(self.inbox) > LENGTH.size + size:
            raise ValueError(f"a hello of {size} bytes, {len(self.inbox)} received")
        return bytes(self.inbox[LENGTH.size :]) if len(self.inbox) == LENGTH.size + size else None


class Acceptor:
    """Accepts and authenticates connections on `listener`, which it owns and closes.

    Args:
        admit: called with the socket (non-blocking) of each peer that has proved the token, and
            with the result of the handshake. The acceptor does not use that socket again.
        seconds: time in which a connection must prove the token.
        max_open: upper limit of unauthenticated connections.
        tickets: admit only peers that have one of these; None for all that know the token.
        signs: sign the frames of peers on other hosts.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        selector: selectors.BaseSelector,
        admit: Callable[[socket.socket, Admitted], None],
        seconds: float = AUTH_SECONDS,
        max_open: int = MAX_OPEN,
        *,
        tickets: Tickets | None = None,
        signs: bool = False,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._token = token
        self._selector = selector
        self._admit = admit
        self._tickets = tickets
        self._signs = signs
        self._unauthenticated: Unauthenticated[_Peer] = Unauthenticated(seconds, max_open)
        # The time at which a pause of accepting ends.
        self._accept_again = _NEVER
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def run_once(self, until: float) -> None:
        """Wait for events until the time `until` (`time.monotonic()`) at most, and handle them."""
        due = min(self._unauthenticated.next_deadline, self._accept_again)
        first = min(until, due)
        # The usual call has no deadline and need not read the clock.
        ready = self._selector.select(
            HOUR if first == _NEVER else bounded(first - time.monotonic())
        )
        # The listener comes last: a peer whose hello has arrived must not be closed to make room.
        for key, events in sorted(ready, key=self._is_listener) if len(ready) > 1 else ready:
            key.data(events)
        if due != _NEVER and time.monotonic() >= due:
            self._close_overdue()
            self._resume_accepting()

    def close(self) -> None:
        """Close the listener and all unauthenticated connections."""
        for peer in self._unauthenticated.all():
            self._drop(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()

    def _is_listener(self, item: tuple[selectors.SelectorKey, int]) -> bool:
        return item[0].fileobj is self._listener

    def _accept(self, _: int) -> None:
        if self._unauthenticated.full and not self._make_room():
            return
        try:
            sock, address = self._listener.accept()
        # The peer has closed the connection meanwhile.
        except (BlockingIOError, ConnectionAbortedError):
            return
        # Out of file descriptors (EMFILE, ENFILE) or of memory.
        except OSError:
            self._make_room()
            return
        signs = self._signs and not is_loopback(address[0])
        self._greet(_Peer(sock, Challenge(self._token, self.port, self._tickets, signs=signs)))

    def _make_room(self) -> bool:
        """Close the oldest unauthenticated connection; if it is too new, pause, return False."""
        now = time.monotonic()
        oldest = self._unauthenticated.replaceable(now)
        if oldest is not None:
            self._close_busy(oldest)
            return True
        self._selector.unregister(self._listener)
        self._accept_again = now + GRACE_SECONDS
        return False

    def _resume_accepting(self) -> None:
        if time.monotonic() >= self._accept_again:
            self._accept_again = _NEVER
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _greet(self, peer: _Peer) -> None:
        """Send the challenge and start the peer's timeout."""
        self._unauthenticated.add(peer, time.monotonic())
        try:
            peer.sock.setblocking(False)
            peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ready = functools.partial(self._receive, peer)
            self._selector.register(peer.sock, selectors.EVENT_READ, ready)
            # The first bytes of a connection always fit into the kernel's buffer.
            peer.sock.send(peer.challenge.nonce)
        # The peer has closed the connection.
        except OSError:
            self._drop(peer)

    def _receive(self, peer: _Peer, _: int) -> None:
        try:
            data = peer.sock.recv(2 * MAX_HELLO_BYTES)
            peer.inbox += data
            if not data:
                self._drop(peer)
            elif (hello := peer.hello()) is not None:
                self._admit_peer(peer, hello)
        except BlockingIOError:
            return
        except TicketRefused as refused:
            with contextlib.suppress(OSError):
                peer.sock.send(refused.reply)
            self._drop(peer)
        # Closed, malformed, or the wrong token: this ends the one connection only.
        except Exception:
            self._drop(peer)

    def _admit_peer(self, peer: _Peer, hello: bytes) -> None:
        admitted = peer.challenge.check(hello)
        peer.sock.send(admitted.reply)
        self._unauthenticated.discard(peer)
        self._selector.unregister(peer.sock)
        self._admit(peer.sock, admitted)

    def _close_overdue(self) -> None:
        for peer in self._unauthenticated.overdue(time.monotonic()):
            self._close_busy(peer)

    def _close_busy(self, peer: _Peer) -> None:
        """Send the frame "busy", which makes a genuine but slow client connect again, and close."""
        with contextlib.suppress(OSError):
            peer.sock.send(pack([BUSY]))
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._unauthenticated.discard(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        peer.sock.close()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; `host` "" listens on every interface, with IPv4 and IPv6."""
    if host:
        return socket.create_server((host, port), backlog=1024)
    if socket.has_dualstack_ipv6():
        six = socket.AF_INET6
        return socket.create_server(("::", port), family=six, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=1024)
