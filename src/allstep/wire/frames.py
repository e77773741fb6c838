"""Frames: packing, unpacking and receiving them; and lists of addresses as text."""

import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sized

from allstep.wire.timeouts import bounded

LENGTH = struct.Struct("!I")
# Sent before the server closes an unauthenticated connection: the client should connect again.
BUSY = b"busy"
# Upper limit of the bytes of a frame's body, request or reply.
MAX_FRAME = 64 << 20
# Bytes of the first read of a reply, enough for the usual length.
_CHUNK = 1 << 12

Fields = list[bytes]


def new_token() -> str:
    """Return a new secret for one run: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def pack(fields: Iterable[bytes]) -> bytes:
    """Return the frame that carries `fields`."""
    body = b"".join([LENGTH.pack(len(field)) + field for field in fields])
    return LENGTH.pack(len(body)) + body


def frame_nbytes(fields: Iterable[Sized]) -> int:
    """Return the length of the body that `pack` would make of `fields`, without making it."""
    return sum(LENGTH.size + len(field) for field in fields)


def unpack(body: bytes, max_fields: int | None = None) -> Fields:
    """Return the fields of a frame's body.

    Raises ValueError if the lengths do not add up or there are more than `max_fields`.
    """
    fields: Fields = []
    at = 0
    while at < len(body):
        if len(fields) == max_fields:
            raise ValueError(f"a frame of more than {max_fields} fields")
        if at + 4 > len(body):
            raise ValueError(f"a field's length is cut off at byte {at} of {len(body)}")
        end = at + 4 + LENGTH.unpack_from(body, at)[0]
        if end > len(body):
            raise ValueError(f"a field ends at byte {end} of {len(body)}")
        fields.append(body[at + 4 : end])
        at = end
    return fields


def receive_frame(
    sock: socket.socket, max_nbytes: int = MAX_FRAME, end: float | None = None
) -> bytes:
    """Receive a frame from a blocking socket and return its body.

    Raises ConnectionError for more than `max_nbytes` bytes. `end`: see `receive`.
    """
    size = LENGTH.unpack(receive(sock, LENGTH.size, end))[0]
    if size > max_nbytes:
        raise ConnectionError(f"received a frame of {size} bytes; expected at most {max_nbytes}")
    return receive(sock, size, end)


def receive_reply(sock: socket.socket, max_nbytes: int = MAX_FRAME) -> bytes:
    """Receive the one frame that a blocking socket's peer owes, and return its body.

    Raises ConnectionError for more than `max_nbytes` bytes, and for bytes after the frame. A
    short reply takes one read, where `receive_frame` needs two: it must not read beyond a frame
    that another one may follow.
    """
    data = bytearray()
    size = None
    while size is None or len(data) < size:
        chunk = sock.recv(min(max(_CHUNK, (size or 0) - len(data)), 1 << 20))
        if not chunk:
            raise ConnectionError(
                f"the connection ended after {len(data)} of {size or LENGTH.size} bytes"
            )
        data += chunk
        if size is None and len(data) >= LENGTH.size:
            size = LENGTH.size + LENGTH.unpack_from(data)[0]
            if size > LENGTH.size + max_nbytes:
                raise ConnectionError(
                    f"received a reply of {size} bytes; expected at most {max_nbytes}"
                )
    if len(data) > size:
        raise ConnectionError(f"received {len(data) - size} bytes after a reply")
    return bytes(memoryview(data)[LENGTH.size :])


def receive(sock: socket.socket, size: int, end: float | None = None) -> bytes:
    """Receive exactly `size` bytes; ConnectionError if the peer closes the connection before.

    `end` is the time by `time.monotonic()` at which all must have arrived (TimeoutError). With None
    the socket's own timeout applies, which restarts with each read.
    """
    data = bytearray()
    while len(data) < size:
        if end is not None:
            _set_timeout(sock, end)
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise ConnectionError(f"the connection ended after {len(data)} of {size} bytes")
        data += chunk
    return bytes(data)


def _set_timeout(sock: socket.socket, end: float) -> None:
    """Let the socket's next call time out at `end`; TimeoutError if that time has passed."""
    left = bounded(end - time.monotonic())
    if not left:
        raise TimeoutError("timed out")
    sock.settimeout(left)


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Return the (host, port) pairs of a text such as `10.0.0.1:4567,[fe80::1]:4567`.

    Raises ValueError for an item that is not HOST:PORT.
    """
    pairs = []
    for item in text.split(","):
        host, _, port = item.strip().rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{item!r} is not HOST:PORT")
        pairs.append((host.strip("[]"), int(port)))
    return pairs


def format_addresses(pairs: Iterable[tuple[str, int]]) -> str:
    """Return (host, port) pairs as text that `parse_addresses` reads."""
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in pairs)


def plain_address(address: str) -> str:
    """Return an IPv4 address without the prefix `::ffff:` that a dual-stack socket puts first."""
    return address.removeprefix("::ffff:")


def is_loopback(address: str) -> bool:
    """Return whether only processes of this host can have this address."""
    return plain_address(address).startswith("127.") or address == "::1"
