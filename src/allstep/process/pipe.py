"""Reads pipes whose writers may never stop, without blocking and without filling the memory."""

import os
from collections.abc import Iterator

_CHUNK = 1 << 16
# Together 1 MB: the capacity of the largest pipe of an unprivileged process.
_NUM_CHUNKS = 16


def chunks_now(fd: int) -> Iterator[bytes]:
    """Yield the available bytes of a non-blocking pipe or socket, at most 1 MB; b"" at its end.

    The number of reads is bounded: a writer that never stops must not keep the caller here.
    """
    for _ in range(_NUM_CHUNKS):
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        yield chunk
        if not chunk:
            return
