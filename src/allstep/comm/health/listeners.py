"""Gloo's listening sockets, closed to other processes once a group is connected.

Gloo keeps a socket listening for as long as a group exists, accepts every connection, and ends the
process when it has no file descriptor left to accept with: 1,000 idle connections of any user of
the machine would end a run. All ranks of a group are connected when it is created, so after that
the socket has no use. It cannot be closed from outside (Gloo treats that as an error, too).
Instead, a socket filter makes the kernel drop every packet for it, before there is a connection.

Only a socket that is in one epoll set with Gloo's connections is touched, because another thread of
the program may open a socket at the same moment.
"""

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Collection
from pathlib import Path

_SO_ATTACH_FILTER = 26
# One instruction, BPF_RET | BPF_K with 0: of each packet, keep 0 bytes.
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_PROGRAM = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))


def close_to_strangers(new: Collection[int], connections: Collection[int]) -> int:
    """Make the listening sockets of a connected Gloo group accept no more; return their number.

    `new` are files that were opened while the group was created. `connections` are those that lead
    to its ranks; a group of one rank has none.
    """
    count = 0
    for epoll in new:
        watched = _watched_by(epoll)
        is_gloos = watched & set(connections) if connections else watched <= set(new)
        for fd in watched if is_gloos else ():
            count += _drop_all(fd)
    return count


def _watched_by(fd: int) -> set[int]:
    """Return the files in an epoll set; an empty set for any other file."""
    try:
        if str(Path(f"/proc/self/fd/{fd}").readlink()) != "anon_inode:[eventpoll]":
            return set()
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}
    # Closed meanwhile, or a kernel that does not show it.
    except (OSError, ValueError):
        return set()


def _drop_all(fd: int) -> bool:
    """Attach the filter if the file is a listening TCP socket; return whether it was attached."""
    try:
        if (sock := tcp_socket(fd)) is None:
            return False
        with sock:
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)
            return True
    # Closed meanwhile, or not permitted here: the socket stays as it is.
    except OSError:
        return False


def tcp_socket(fd: int) -> socket.socket | None:
    """Return a duplicate of an open file that is a TCP socket; None for any other file.

    Raises OSError if the file is closed.
    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return None
    sock = socket.socket(fileno=os.dup(fd))
    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
        return sock
    sock.close()
    return None
