"""The sockets of a Gloo group: which rank each leads to, and whether its other side is alive.

Gloo does not expose its sockets, so we compare the files that are open before and after it
connects. Each rank then publishes both ends of its new sockets through the store; a socket of ours
whose far end is the near end of another rank's socket leads to that rank. Other files that were
opened meanwhile (connections of the store, of other threads) match no rank and are left alone.

The kernel's information about a connection (TCP_INFO) distinguishes three states:

```
closed    the process at the other end has ended, or has left the group
silent    we sent something and the other *kernel* did not answer: the host or the network is down
open      everything else. The kernel answers for a process that is stopped, swapped out or busy:
          a slow rank is not lost
```

So TCP_USER_TIMEOUT is not used: it also counts the full buffer of a stopped process as a failure. A
rank that only waits sends nothing; keepalive probes are sent for it.

We keep duplicates of the sockets. They exist until `close`, whatever Gloo does with its own, and
`shut` ends the connection for both sides at once: every operation that waits on it fails, on both
hosts. A forked process (a DataLoader worker) would keep the connections open after the death of its
parent, so it closes them, Gloo's included.
"""

import json
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store, TCPStore

from allstep.comm.health.listeners import close_to_strangers, tcp_socket
from allstep.comm.join.launcher_store import WireStore, collect, root_of
from allstep.wire.frames import plain_address

# One end of a connection: an address and a port.
Ends = tuple[str, int]


class Link(NamedTuple):
    """A connection to another rank: our duplicate of the socket, and Gloo's own number for it."""

    peer: int
    sock: socket.socket
    gloo_fd: int


class Info(NamedTuple):
    """What the kernel knows of a connection."""

    is_open: bool
    owes_answer: bool
    """Whether we have sent data or two probes since anything was last received."""
    since_answer: float
    """Seconds since anything was received from the other kernel."""
    nbytes: int
    """Bytes sent and received so far."""


_ESTABLISHED = 1
# Linux accepts no more; a limit that a user sets may be longer.
MAX_KEEPALIVE_SECONDS = 32767
_MAX_KEEPALIVE_PROBES = 127
# State, probes, unacked; milliseconds since data was sent and since anything was received; bytes
# acknowledged and received.
_INFO = struct.Struct("@B2xB20xI16xI8xI60xQQ")


class Sockets:
    """The connections of one Gloo group, made by `found`. Peers are ranks of that group."""

    def __init__(self, links: list[Link]) -> None:
        self._links = links
        self._owing_since: dict[int, float] = {}
        self._silence: dict[int, float] = {}
        _all.add(self)

    def closed(self) -> set[int]:
        """Return the ranks whose connection has ended."""
        ended = {peer: info for peer, info in self._infos() if not info.is_open}
        for peer, info in ended.items():
            self._silence.setdefault(peer, info.since_answer)
        return set(ended)

    def silent(self, seconds: float) -> set[int]:
        """Return the ranks that have owed us an answer for longer than `seconds`.

        The time counts from the first call that found the answer missing.
        """
        now = time.monotonic()
        found = set()
        for peer, info in self._infos():
            if not info.owes_answer:
                self._owing_since.pop(peer, None)
            elif min(info.since_answer, now - self._owing_since.setdefault(peer, now)) > seconds:
                found.add(peer)
        return found

    def silence(self, peer: int) -> float:
        """Return the seconds of silence at the moment a rank's connection was found closed."""
        return self._silence.get(peer, 0.0)

    def nbytes(self) -> int:
        """Return the bytes sent and received so far over all connections."""
        return sum(info.nbytes for _, info in self._infos())

    def _infos(self) -> Iterator[tuple[int, Info]]:
        for peer, sock, _ in list(self._links):
            yield peer, look_at(sock)

    def shut(self) -> None:
        """End all connections, for Gloo and for the other side."""
        for link in self._links:
            try:
                link.sock.shutdown(socket.SHUT_RDWR)
            # The connection has already ended.
            except OSError:
                continue

    def close(self) -> None:
        """Close our duplicates; Gloo's own sockets stay as they are."""
        links, self._links = self._links, []
        for link in links:
            link.sock.close()

    def let_go(self) -> None:
        """Close our duplicates and Gloo's sockets in a forked process.

        Otherwise the child would keep connections of its parent open.
        """
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for link in self._links:
            # Gloo may have closed its socket, and another file may have its number now.
            if _same_file(link.gloo_fd, link.sock.fileno()):
                os.dup2(nothing, link.gloo_fd, inheritable=False)
        os.close(nothing)
        self.close()

    def __del__(self) -> None:
        self.close()


def found(
    create: Callable[[], Any], store: Store, rank: int, size: int, seconds: float, lost: float
) -> tuple[Any, Sockets]:
    """Return the Gloo group that `create` makes, and its sockets. All ranks call it together.

    `seconds` limits the wait for the other ranks; `lost` is the silence in seconds after which a
    host counts as lost.
    """
    before = _open_files()
    gloo = create()
    new = _open_files() - before
    near = _connections(sorted(new), _ports_of(store))
    links: list[Link] = []
    try:
        links = _matched(near, store, rank, size, seconds)
    finally:
        for fd in near.keys() - {link.gloo_fd for link in links}:
            near[fd][2].close()
    for link in links:
        _probe(link.sock, lost)
    if len({link.peer for link in links}) == size - 1:
        close_to_strangers(new, [link.gloo_fd for link in links])
    return gloo, Sockets(links)


# By Gloo's file number: near end, far end, our duplicate.
_Near = dict[int, tuple[Ends, Ends, socket.socket]]


def _matched(near: _Near, store: Store, rank: int, size: int, seconds: float) -> list[Link]:
    """Return a link for each of our sockets whose ends, reversed, are those of another rank's."""
    own_ends = json.dumps([[ours, theirs] for ours, theirs, _ in near.values()])
    all_ends = collect(store, "sockets", rank, size, own_ends, seconds)
    owner = {
        (tuple(theirs), tuple(ours)): other
        for other, text in enumerate(all_ends)
        if other != rank
        for ours, theirs in json.loads(text)
    }
    return [
        Link(owner[ours, theirs], sock, fd)
        for fd, (ours, theirs, sock) in near.items()
        if (ours, theirs) in owner
    ]


def _open_files() -> set[int]:
    """Return the open files, without the one of this listing, whose number Gloo may get next."""
    return {
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    }


def _connections(fds: list[int], store_ports: set[int]) -> _Near:
    """Return the TCP connections among the open files, without those of the store."""
    near: _Near = {}
    for fd in fds:
        ends = _ends(fd)
        if ends is not None and not {ends[0][1], ends[1][1]} & store_ports:
            near[fd] = *ends, socket.socket(fileno=os.dup(fd))
    return near


def _ends(fd: int) -> tuple[Ends, Ends] | None:
    """Return near and far end of a TCP connection; None for any other file."""
    try:
        if (sock := tcp_socket(fd)) is None:
            return None
        with sock:
            return _end(sock.getsockname()), _end(sock.getpeername())
    # Closed meanwhile, or not connected.
    except OSError:
        return None


def _end(name: Any) -> Ends:
    return plain_address(name[0]), name[1]


def _ports_of(store: Store) -> set[int]:
    """Return the ports on which the store is served."""
    store = root_of(store)
    if isinstance(store, WireStore):
        return {store.client.server_address[1]}
    return {store.port} if isinstance(store, TCPStore) else set()


def look_at(sock: socket.socket) -> Info:
    """Return the state of a connection."""
    try:
        state, probes, unacked, sent_ago, received_ago, acked, nbytes_received = _INFO.unpack_from(
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        )
    except OSError:
        return Info(False, False, 0.0, 0)
    # If the process there does not read, data may stay unacknowledged although the kernel answers
    # each repetition: that is no silence. Such a kernel also leaves single probes unanswered.
    owes_answer = bool(probes > 1 or (unacked and sent_ago < received_ago))
    return Info(state == _ESTABLISHED, owes_answer, received_ago / 1000, acked + nbytes_received)


def _probe(sock: socket.socket, lost: float) -> None:
    """Make the kernel send keepalive probes on an idle connection, and give up within `lost` s."""
    interval = min(max(1, int(lost / 5)), MAX_KEEPALIVE_SECONDS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    count = min(max(1, int(0.8 * lost / interval) - 1), _MAX_KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)


def _same_file(one: int, other: int) -> bool:
    try:
        first, second = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


_all: weakref.WeakSet[Sockets] = weakref.WeakSet()


def _let_all_go() -> None:
    for sockets in list(_all):
        sockets.let_go()


os.register_at_fork(after_in_child=_let_all_go)
