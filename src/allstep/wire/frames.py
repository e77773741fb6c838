"""Frames on the wire: pack and unpack, and addresses as text."""

import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sized

from allstep.wire.patience import bounded

LENGTH = struct.Struct("!I")
# What a connection gets that is closed before it has shown the token: connect again.
BUSY = b"busy"
# The longest body of a frame, request or reply.
MAX_FRAME = 64 << 20
# Room for a reply of the usual length.
_PIECE = 1 << 12

Fields = list[bytes]


def new_token() -> str:
    """A fresh secret for one run."""
    return secrets.token_hex(16)


def pack(fields: Iterable[bytes]) -> bytes:
    """The frame that carries these fields."""
    body = b"".join([LENGTH.pack(len(field)) + field for field in fields])
    return LENGTH.pack(len(body)) + body


def frame_nbytes(fields: Iterable[Sized]) -> int:
    """The length of the body that `pack` makes of these fields, without making it."""
    return sum(LENGTH.size + len(field) for field in fields)


def unpack(body: bytes, max_fields: int | None = None) -> Fields:
    """The fields of a frame's body; ValueError when lengths do not add up or there are too many."""
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


def receive_frame(sock: socket.socket, most: int = MAX_FRAME, end: float | None = None) -> bytes:
    """The body of a blocking socket's next frame; ConnectionError for more than `most` bytes."""
    size = LENGTH.unpack(receive(sock, LENGTH.size, end))[0]
    if size > most:
        raise ConnectionError(f"a frame of {size} bytes came; at most {most} are expected here")
    return receive(sock, size, end)


def receive_reply(sock: socket.socket) -> bytes:
    """The body of the one frame that a blocking socket's other side owes; ConnectionError for more.

    A short reply takes one read here, where `receive_frame` needs two: a frame that another one may
    follow must not be read beyond its end.
    """
    data = bytearray()
    size = None
    while size is None or len(data) < size:
        chunk = sock.recv(min(max(_PIECE, (size or 0) - len(data)), 1 << 20))
        if not chunk:
            raise ConnectionError(
                f"the connection ended after {len(data)} of {size or LENGTH.size} bytes"
            )
        data += chunk
        if size is None and len(data) >= LENGTH.size:
            size = LENGTH.size + LENGTH.unpack_from(data)[0]
            if size > LENGTH.size + MAX_FRAME:
                raise ConnectionError(
                    f"a reply of {size} bytes came; at most {MAX_FRAME} are expected"
                )
    if len(data) > size:
        raise ConnectionError(f"{len(data) - size} bytes came after a reply")
    return bytes(memoryview(data)[LENGTH.size :])


def receive(sock: socket.socket, size: int, end: float | None = None) -> bytes:
    """Just so many bytes; ConnectionError when the other side ends before.

    end: by `time.monotonic()`, when all must have come (TimeoutError); None for the socket's own
    timeout, which counts from the last byte.
    """
    data = bytearray()
    while len(data) < size:
        if end is not None:
            _allow(sock, end)
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise ConnectionError(f"the connection ended after {len(data)} of {size} bytes")
        data += chunk
    return bytes(data)


def _allow(sock: socket.socket, end: float) -> None:
    left = bounded(end - time.monotonic())
    if not left:
        raise TimeoutError("timed out")
    sock.settimeout(left)


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """`10.0.0.1:4567,[fe80::1]:4567` as pairs of host and port."""
    pairs = []
    for item in text.split(","):
        host, _, port = item.strip().rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{item!r} is not HOST:PORT")
        pairs.append((host.strip("[]"), int(port)))
    return pairs


def format_addresses(pairs: Iterable[tuple[str, int]]) -> str:
    """The inverse of `parse_addresses`."""
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in pairs)


def plain_address(address: str) -> str:
    """`::ffff:10.0.0.1` is how a dual-stack socket spells 10.0.0.1."""
    return address.removeprefix("::ffff:")
