"""Frames on the wire: pack and unpack, and addresses as text."""

import hmac
import secrets
import socket
import struct
from collections.abc import Iterable

LENGTH = struct.Struct("!I")
BUSY = b"busy"  # what a connection gets that is closed before it has shown the token: connect again

Fields = list[bytes]


def new_token() -> str:
    """A fresh secret for one run."""
    return secrets.token_hex(16)


def pack(fields: Iterable[bytes]) -> bytes:
    """The frame that carries these fields."""
    body = b"".join(LENGTH.pack(len(field)) + field for field in fields)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Fields:
    """The fields of a frame's body; ValueError when the lengths do not add up."""
    fields, at = [], 0
    while at < len(body):
        if at + 4 > len(body):
            raise ValueError(f"a field's length is cut off at byte {at} of {len(body)}")
        end = at + 4 + LENGTH.unpack_from(body, at)[0]
        if end > len(body):
            raise ValueError(f"a field ends at byte {end} of {len(body)}")
        fields.append(body[at + 4 : end])
        at = end
    return fields


def proof(token: str, challenge: bytes) -> bytes:
    """What shows that we know the token, without sending it."""
    return hmac.digest(token.encode(), challenge, "sha256")


def receive_frame(sock: socket.socket) -> bytes:
    """The body of the next frame of a blocking socket."""
    return receive(sock, LENGTH.unpack(receive(sock, 4))[0])


def receive(sock: socket.socket, size: int) -> bytes:
    """Just so many bytes; ConnectionError when the other side ends before."""
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise ConnectionError(f"the connection ended after {len(data)} of {size} bytes")
        data += chunk
    return bytes(data)


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
