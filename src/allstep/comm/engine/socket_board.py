"""The board of ranks on several hosts: each rank has one connection to rank 0.

Rank 0 listens where the kernel lets it and says in the store where that is, with a fresh token; whoever connects must prove that he
knows it. Connections are kept alive by the kernel, so that a host without sign of life ends them, and an ended connection is a rank that
is gone.
"""

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from allstep import machine
from allstep.comm.engine.board import Board
from allstep.comm.engine.ring import Frames
from allstep.comm.lives import Lives
from allstep.errors import CommError
from allstep.limits import Limits
from allstep.wire.frames import new_token, pack, proof, receive, receive_frame, unpack

_CHALLENGE = 16
_HELLO_SECONDS = 3.0  # for one who connects to say who he is
_PIECE = 1 << 18


class _Link:
    """One connection: what comes as messages, and what could not be sent yet."""

    def __init__(self, sock: socket.socket, lost_seconds: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        every = max(1, int(lost_seconds / 5))
        for option, value in ((socket.TCP_KEEPIDLE, every), (socket.TCP_KEEPINTVL, every), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_seconds * 800))
        self.sock = sock
        self.has_ended = False
        self.unsent = b""
        self._frames = Frames()

    def send(self, data: bytes) -> None:
        """As much as goes now; the rest stays here. To one who is gone, nothing."""
        self.unsent = self.unsent + data if self.unsent else data
        try:
            while self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self.unsent = b""  # the reading side finds out

    def receive(self) -> list[bytes]:
        try:
            data = self.sock.recv(_PIECE)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.has_ended = True
        return self._frames.feed(data)

    def close(self) -> None:
        """Send what is left first, for a second."""
        with contextlib.suppress(OSError):
            self.sock.settimeout(1.0)
            self.sock.sendall(self.unsent)
        self.has_ended = True
        self.sock.close()


class SocketBoard(Board):
    """links: rank 0 has one to each rank, the others one to rank 0. pids: of those peers that are on this host."""

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
        self._poll = select.epoll()  # two threads may wait on it at once
        for fd in (*self._by_fd, self._bell):
            self._poll.register(fd, select.EPOLLIN)
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._is_attended = False
        self._gate = threading.Event()  # the thread sleeps here while a caller drives

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

    def tell(self, frames: Sequence[bytes]) -> None:
        self._own_told.extend(frame[4:] for frame in frames)
        self._send(list(self._links), b"".join(frames))

    def told(self) -> list[bytes]:
        if self.rank == 0:
            return self._take_own_told()
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

    def has_news(self) -> bool:
        return bool(self._own_posts or self._own_told or self._inbox or self._poll.poll(0))

    def attend(self) -> None:
        self._gate.clear()
        self._is_attended = True

    def leave(self) -> None:
        self._is_attended = False
        if self.has_news():
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


def connect(store: Store, rank: int, size: int, limits: Limits, pids: Mapping[int, int]) -> SocketBoard:
    """All ranks together. pids: of the other ranks of this host."""
    links = _accept_all(store, size, limits.start) if rank == 0 else {0: _reach(store, rank, limits.start)}
    return SocketBoard(rank, size, links, limits.lost, pids)


def _accept_all(store: Store, size: int, seconds: float) -> dict[int, socket.socket]:
    token, end = new_token(), time.monotonic() + seconds
    links: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), backlog=size) as server:
        addresses = [*machine.outside_addresses(), "127.0.0.1"]
        store.set("board", json.dumps({"addresses": addresses, "port": server.getsockname()[1], "token": token}))
        while len(links) < size - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                sock, _ = server.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, size) if rank not in links]
                raise CommError(f"ranks {missing} did not connect to rank 0 within {seconds:.0f} s", rank=0) from None
            _admit(sock, token, links)
    return links


def _admit(sock: socket.socket, token: str, links: dict[int, socket.socket]) -> None:
    """Let a rank in that knows the token; anybody else is sent away."""
    try:
        sock.settimeout(_HELLO_SECONDS)
        challenge = secrets.token_bytes(_CHALLENGE)
        sock.sendall(challenge)
        who, answer = unpack(receive_frame(sock))
        if hmac.compare_digest(answer, proof(token, challenge + who)):
            sock.sendall(proof(token, who + challenge))
            links[int(who)] = sock
            return
    except (OSError, ValueError):
        pass
    sock.close()


def _reach(store: Store, rank: int, seconds: float) -> socket.socket:
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
    raise CommError(f"rank {rank} did not reach rank 0 within {seconds:.0f} s ({why})", rank=rank, peer=0)


def _introduce(address: str, port: int, token: str, rank: int) -> socket.socket:
    sock = socket.create_connection((address, port), timeout=_HELLO_SECONDS)
    try:
        challenge, who = receive(sock, _CHALLENGE), b"%d" % rank
        sock.sendall(pack([who, proof(token, challenge + who)]))
        expected = proof(token, who + challenge)
        if not hmac.compare_digest(receive(sock, len(expected)), expected):
            raise ConnectionError("something else answers there")
    except BaseException:
        sock.close()
        raise
    return sock
