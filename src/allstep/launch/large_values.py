"""Bytes of any length in a store whose values have a limit: numbered pieces, and their number last."""

from collections.abc import Callable, Iterator

# Small enough that many workers can fetch theirs at a time: a store holds 512 MB of replies.
_PIECE = 1 << 20


def pieces(key: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """What to set, in this order: whoever sees the last entry can fetch all."""
    count = -(-len(data) // _PIECE)
    for index in range(count):
        yield f"{key}/{index}", data[index * _PIECE : (index + 1) * _PIECE]
    yield key, b"%d" % count


def collect(key: str, get: Callable[[str], bytes | None]) -> bytes | None:
    """The bytes again; None when they are not all there."""
    count = get(key)
    if count is None:
        return None
    found = [get(f"{key}/{index}") for index in range(int(count))]
    return b"".join(piece for piece in found if piece is not None)
