"""The board of ranks on several hosts: each rank has one connection to rank 0.

Rank 0 listens on a free port and puts its addresses into the store, with a new token. Both ends of
a connection prove that they know the token (`wire.handshake`); a connection that proves nothing
delays no rank (`wire.acceptor`). The kernel keeps connections alive, so that it ends the connection
to an unreachable host. An ended connection means a lost rank.
"""

import contextlib
import json
import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from allstep import machine
from allstep.comm.health.processes import Lives
from allstep.comm.health.sockets import MAX_KEEPALIVE_SECONDS
from allstep.engine.board.board import Board
from allstep.engine.board.byte_ring import Frames
from allstep.errors import CommError
from allstep.limits import Limits
from allstep.wire.acceptor import Acceptor, listen
from allstep.wire.frames import new_token
from allstep.wire.handshake import Admitted, introduce

_CONNECT_SECONDS = 3.0
# Seconds for the handshake of a connection; then another address of rank 0 is tried.
_HELLO_SECONDS = 10.0
# TCP_USER_TIMEOUT is a number of milliseconds in 32 bits.
_MAX_MILLISECONDS = (1 << 31) - 1
# Bytes to receive at once.
_CHUNK = 1 << 18


class _Link:
    """One connection: assembles messages, and keeps the bytes that could not be sent yet."""

    def __init__(self, sock: socket.socket, lost_seconds: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        every = min(max(1, int(lost_seconds / 5)), MAX_KEEPALIVE_SECONDS)
        for option, value in (
            (socket.TCP_KEEPIDLE, every),
            (socket.TCP_KEEPINTVL, every),
            (socket.TCP_KEEPCNT, 3),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        milliseconds = min(int(lost_seconds * 800), _MAX_MILLISECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self.sock = sock
        self.has_ended = False
        self.unsent = b""
        self._frames = Frames()

    def send(self, data: bytes) -> None:
        """Send as much as possible now and keep the rest; drop the data if the peer has ended."""
        self.unsent = self.unsent + data if self.unsent else data
        try:
            while self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]
        except BlockingIOError:
            return
        except OSError:
            # `receive` detects the end.
            self.unsent = b""

    def receive(self) -> list[bytes]:
        """Return messages that have become complete; set `has_ended` after the last byte."""
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.has_ended = True
        return self._frames.feed(data)

    def close(self) -> None:
        """Send the rest for at most 1 s, then close the connection."""
        with contextlib.suppress(OSError):
            self.sock.settimeout(1.0)
            self.sock.sendall(self.unsent)
        self.has_ended = True
        self.sock.close()


class SocketBoard(Board):
    """The board of ranks on several hosts.

    `links`: the sockets by peer: rank 0 has one to each rank, the others have one to rank 0.
    `lost_seconds`: the silence after which a host is lost. `pids`: process ids of the peers on this
    host.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: dict[int, socket.socket],
        lost_seconds: float,
        pids: Mapping[int, int] = {},
    ) -> None:
        super().__init__(rank, size)
        self._lives = Lives({peer: pid for peer, pid in pids.items() if peer in links})
        self._links = {peer: _Link(sock, lost_seconds) for peer, sock in links.items()}
        self._by_fd = {link.sock.fileno(): peer for peer, link in self._links.items()}
        self._sending = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Two threads may wait on it at once.
        self._poll = select.epoll()
        for fd in (*self._by_fd, self._bell):
            self._poll.register(fd, select.EPOLLIN)
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._is_attended = False
        # The engine's thread sleeps here while a caller drives.
        self._gate = threading.Event()

    def post(self, frame: bytes, driving: bool = False) -> None:
        if self.rank:
            self._send([0], frame)
        else:
            self._own_posts.append(frame[4:])
            if not driving:
                os.eventfd_write(self._bell, 1)

    def posts(self) -> list[tuple[int, bytes]]:
        found = self._take_own_posts()
        found += self._inbox
        self._inbox.clear()
        return found

    def publish(self, frames: Sequence[bytes]) -> None:
        self._own_published.extend(frame[4:] for frame in frames)
        self._send(list(self._links), b"".join(frames))

    def published(self) -> list[bytes]:
        if self.rank == 0:
            return self._take_own_published()
        found = [message for _, message in self._inbox]
        self._inbox.clear()
        return found

    def _send(self, peers: Sequence[int], data: bytes) -> None:
        with self._sending:
            for peer in peers:
                link = self._links[peer]
                had_rest = bool(link.unsent)
                link.send(data)
                if bool(link.unsent) != had_rest and not link.has_ended:
                    events = select.EPOLLIN | (select.EPOLLOUT if link.unsent else 0)
                    self._poll.modify(link.sock.fileno(), events)

    def look(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        for fd, _ in self._poll.poll(0):
            peer = self._by_fd.get(fd)
            if peer is not None:
                self._look_at(peer, self._links[peer])

    def _look_at(self, peer: int, link: _Link) -> None:
        if link.unsent:
            self._send([peer], b"")
        self._inbox.extend((peer, message) for message in link.receive())
        if link.has_ended:
            self._poll.unregister(link.sock.fileno())

    def has_work(self) -> bool:
        return bool(self._own_posts or self._own_published or self._inbox or self._poll.poll(0))

    def attend(self) -> None:
        self._gate.clear()
        self._is_attended = True

    def leave(self) -> None:
        self._is_attended = False
        if self.has_work():
            self._gate.set()

    def wait(self, seconds: float) -> None:
        self._poll.poll(seconds)

    def sleep(self, seconds: float) -> None:
        if self._is_attended:
            self._gate.wait(seconds)
            self._gate.clear()
        else:
            self._poll.poll(seconds)

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)
        self._gate.set()

    def nudge(self) -> None:
        os.eventfd_write(self._bell, 1)

    def lost(self, closely: bool = False) -> int | None:
        ended = next((peer for peer, link in self._links.items() if link.has_ended), None)
        return self._lives.lost(closely) if ended is None else ended

    def close(self) -> None:
        self._lives.close()
        with self._sending:
            for link in self._links.values():
                link.close()
        self._poll.close()
        os.close(self._bell)


def connect(
    store: Store, rank: int, size: int, limits: Limits, pids: Mapping[int, int]
) -> SocketBoard:
    """Connect all ranks to rank 0; called by all ranks. `pids`: of the other ranks of this host."""
    if rank == 0:
        links = _accept_all(store, size, limits.start)
    else:
        links = {0: _reach(store, rank, limits.start)}
    return SocketBoard(rank, size, links, limits.lost, pids)


def _accept_all(store: Store, size: int, seconds: float) -> dict[int, socket.socket]:
    """Accept each other rank once; raise CommError that names the ranks that did not connect."""
    token, end = new_token(), time.monotonic() + seconds
    links: dict[int, socket.socket] = {}

    def admit(sock: socket.socket, admitted: Admitted) -> None:
        rank = int(admitted.who)
        if not 0 < rank < size:
            raise ValueError(f"rank {rank} of {size} connected to rank 0")
        # A slow rank may have given up and connected again: its last connection counts.
        if rank in links:
            links[rank].close()
        links[rank] = sock

    with selectors.DefaultSelector() as selector:
        acceptor = Acceptor(listen("", 0), token, selector, admit)
        try:
            addresses = [*machine.outside_addresses(), "127.0.0.1"]
            card = {"addresses": addresses, "port": acceptor.port, "token": token}
            store.set("board", json.dumps(card))
            while len(links) < size - 1 and time.monotonic() < end:
                acceptor.run_once(end)
        finally:
            acceptor.close()
    missing = [rank for rank in range(1, size) if rank not in links]
    if missing:
        for sock in links.values():
            sock.close()
        raise CommError(f"ranks {missing} did not connect to rank 0 within {seconds:.0f} s", rank=0)
    return links


def _reach(store: Store, rank: int, seconds: float) -> socket.socket:
    """Connect to rank 0 at one of its addresses; raise CommError after `seconds`."""
    end = time.monotonic() + seconds
    store.wait(["board"], timedelta(seconds=seconds))
    card = json.loads(store.get("board"))
    why = ""
    while time.monotonic() < end:
        for address in card["addresses"]:
            try:
                return _introduce(address, card["port"], card["token"], rank)
            except (OSError, ValueError) as error:
                why = f"{address}:{card['port']}: {error}"
        time.sleep(0.05)
    raise CommError(
        f"rank {rank} did not reach rank 0 within {seconds:.0f} s ({why})", rank=rank, peer=0
    )


def _introduce(address: str, port: int, token: str, rank: int) -> socket.socket:
    sock = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
    try:
        introduce(sock, token, _HELLO_SECONDS, who=b"%d" % rank)
    except BaseException:
        sock.close()
        raise
    return sock
