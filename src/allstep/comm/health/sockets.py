"""The sockets of a Gloo group: which leads to which rank, and whether the other side is still
there.

Gloo does not show its sockets, so we compare the files that are open before and after it connects.
Each rank then says through the store from where to where its new sockets lead; ours whose far end
is the near end of another rank's leads to that rank. Anything else that was opened meanwhile (the
store's connections, a thread's) matches nobody and is left alone.

What the kernel knows of a connection (TCP_INFO) tells three states apart:

================
============================================================================================================
closed            the process at the other end is gone, or has left the group silent            we
sent something and no answer came from the other *kernel*: the host or the cable is gone open all
else. A process that is stopped, swapped out or busy has a kernel that answers for it: slow is not
dead ================
============================================================================================================

So there is no TCP_USER_TIMEOUT here, which also counts a full buffer of a stopped process as death.
Who only waits sends nothing: keepalive probes do it for him.

We keep duplicates of the sockets. They live until `close`, whatever Gloo does with its own, and
`shut` ends the connection for both sides at once: every operation that waits on it fails, here and
there. A forked process (a DataLoader worker) would keep the connections open after the death of its
parent, so it lets go of them, Gloo's included.
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
from allstep.comm.join.store import WireStore, collect, root_of
from allstep.wire.frames import plain_address

Ends = tuple[str, int]  # an address and a port


class Link(NamedTuple):
    """A connection to another rank: our duplicate of the socket, and Gloo's own number for it."""

    peer: int
    sock: socket.socket
    gloo_fd: int


class Info(NamedTuple):
    """What the kernel knows of a connection."""

    is_open: bool
    owes_answer: bool  # we have sent something, data or two probes, since we last heard anything
    since_answer: float  # seconds since anything came from the other kernel
    nbytes: int  # moved so far, both ways


_ESTABLISHED = 1
# Linux takes no more; a limit that a user sets may be longer.
MAX_KEEPALIVE_SECONDS = 32767
_MAX_KEEPALIVE_PROBES = 127
# State, probes, unacked; milliseconds since data was sent and since anything was heard; bytes
# acknowledged and received.
_INFO = struct.Struct("@B2xB20xI16xI8xI60xQQ")


class Sockets:
    """The connections of one Gloo group. `found` makes them; peers are ranks of that group."""

    def __init__(self, links: list[Link]) -> None:
        self._links = links
        self._owing_since: dict[int, float] = {}
        self._silence: dict[int, float] = {}
        _all.add(self)

    def closed(self) -> set[int]:
        """The ranks whose connection has ended."""
        ended = {peer: info for peer, info in self._infos() if not info.is_open}
        for peer, info in ended.items():
            self._silence.setdefault(peer, info.since_answer)
        return set(ended)

    def silent(self, seconds: float) -> set[int]:
        """The ranks that have owed us an answer for longer than that.

        Counted from the first call that saw them owe it.
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
        """Seconds for which nothing had come from a rank's host when we first saw that its
        connection had ended."""
        return self._silence.get(peer, 0.0)

    def nbytes(self) -> int:
        """Moved so far over all connections."""
        return sum(info.nbytes for _, info in self._infos())

    def _infos(self) -> Iterator[tuple[int, Info]]:
        for peer, sock, _ in list(self._links):
            yield peer, look_at(sock)

    def shut(self) -> None:
        """End all connections, for Gloo and for the other side."""
        for link in self._links:
            try:
                link.sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # has ended by itself
                continue

    def close(self) -> None:
        """Let go of our duplicates; Gloo's own sockets stay as they are."""
        links, self._links = self._links, []
        for link in links:
            link.sock.close()

    def let_go(self) -> None:
        """In a forked process: neither our duplicates nor Gloo's sockets keep a connection of the
        parent open."""
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for link in self._links:
            if _same_file(
                link.gloo_fd, link.sock.fileno()
            ):  # Gloo may have closed its own, and somebody have its number
                os.dup2(nothing, link.gloo_fd, inheritable=False)
        os.close(nothing)
        self.close()

    def __del__(self) -> None:
        self.close()


def found(
    create: Callable[[], Any], store: Store, rank: int, size: int, seconds: float, lost: float
) -> tuple[Any, Sockets]:
    """A Gloo group, made by `create` on all ranks at once, and its sockets. lost: seconds of
    silence after which a host is gone."""
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


_Near = dict[
    int, tuple[Ends, Ends, socket.socket]
]  # by Gloo's number: near end, far end, our duplicate


def _matched(near: _Near, store: Store, rank: int, size: int, seconds: float) -> list[Link]:
    """Our sockets whose two ends are, the other way round, those of another rank's socket."""
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
    """Without the one that the listing itself needs: Gloo may be the next to get its number."""
    return {
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    }


def _connections(fds: list[int], store_ports: set[int]) -> _Near:
    """Those of the open files that are TCP connections, and none of the store's."""
    near: _Near = {}
    for fd in fds:
        ends = _ends(fd)
        if ends is not None and not {ends[0][1], ends[1][1]} & store_ports:
            near[fd] = *ends, socket.socket(fileno=os.dup(fd))
    return near


def _ends(fd: int) -> tuple[Ends, Ends] | None:
    """Near and far end of a TCP connection; None for anything else."""
    try:
        if (sock := tcp_socket(fd)) is None:
            return None
        with sock:
            return _end(sock.getsockname()), _end(sock.getpeername())
    except OSError:  # closed meanwhile, or not connected
        return None


def _end(name: Any) -> Ends:
    return plain_address(name[0]), name[1]


def _ports_of(store: Store) -> set[int]:
    """Where the store is served."""
    store = root_of(store)
    if isinstance(store, WireStore):
        return {store.client.server_address[1]}
    return {store.port} if isinstance(store, TCPStore) else set()


def look_at(sock: socket.socket) -> Info:
    """The state of a connection."""
    try:
        state, probes, unacked, sent_ago, received_ago, acked, nbytes_received = _INFO.unpack_from(
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        )
    except OSError:
        return Info(False, False, 0.0, 0)
    # Data may stay unacknowledged although each repetition is answered, when the process there does
    # not read: that is no silence.
    # And a kernel whose process does not read lets a probe pass now and then without an answer.
    owes_answer = bool(probes > 1 or (unacked and sent_ago < received_ago))
    return Info(state == _ESTABLISHED, owes_answer, received_ago / 1000, acked + nbytes_received)


def _probe(sock: socket.socket, lost: float) -> None:
    """Let the kernel ask for a sign of life when nothing else is under way, and give up in time."""
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
