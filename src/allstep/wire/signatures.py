"""Signed frames: a tag at the end of each frame proves that the peer wrote it, and in which place.

::

    signed body = body | tag (16 bytes)
    tag         = BLAKE2b with the key of the direction, over number (8 bytes) | body

Both directions of a connection have a key of their own, derived from the secret of the peers and
from both nonces of the handshake (`handshake`), so a frame of another connection or of the other
direction has a wrong tag. `number` counts the frames of a direction from 0. It is not sent: both
sides count, so a frame that is repeated, left out or moved has a wrong tag, like a changed one.

A wrong tag ends the connection. A tag takes about 2 us for the usual frame of some hundred bytes.
Frames are not encrypted.
"""

import hashlib
import hmac
from typing import NamedTuple

from allstep.wire.frames import LENGTH

TAG_NBYTES = 16
_NUMBER_NBYTES = 8


class ForgedFrame(ConnectionError):
    """A frame with a wrong tag: changed, repeated, left out or moved on its way."""


class Signature:
    """The tags of one direction of a connection, in the order of its frames."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def sign(self, frame: bytes) -> bytes:
        """Return a frame of `frames.pack` with its tag."""
        body = memoryview(frame)[LENGTH.size :]
        length = LENGTH.pack(len(body) + TAG_NBYTES)
        return b"".join((length, body, self._next_tag(body)))

    def check(self, body: bytes) -> bytes:
        """Return the body of a received frame without its tag; ForgedFrame if that is wrong."""
        view = memoryview(body)
        if not hmac.compare_digest(view[-TAG_NBYTES:], self._next_tag(view[:-TAG_NBYTES])):
            raise ForgedFrame(
                f"frame {self._number - 1} has a wrong signature: it was changed, repeated, left"
                " out or moved between the hosts"
            )
        return body[:-TAG_NBYTES]

    def _next_tag(self, body: memoryview) -> bytes:
        number = self._number.to_bytes(_NUMBER_NBYTES, "big")
        self._number += 1
        digest = hashlib.blake2b(number, key=self._key, digest_size=TAG_NBYTES)
        digest.update(body)
        return digest.digest()


class Signatures(NamedTuple):
    """The signatures of a connection, as one of its sides uses them."""

    sent: Signature
    received: Signature
