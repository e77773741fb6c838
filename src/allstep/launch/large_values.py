"""Values of any length in a store with a limit per value: numbered chunks, then their number."""

from collections.abc import Callable, Iterator

# Small enough for many workers to fetch chunks at once: a store holds 512 MB of replies.
_CHUNK = 1 << 20


def chunks(key: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the keys and values to set, in this order: a reader of the last one can fetch all."""
    count = -(-len(data) // _CHUNK)
    for index in range(count):
        yield f"{key}/{index}", data[index * _CHUNK : (index + 1) * _CHUNK]
    yield key, b"%d" % count


def collect(key: str, get: Callable[[str], bytes | None]) -> bytes | None:
    """Return the bytes that were stored under `key` with `chunks`; None if they are incomplete.

    get: returns the value of a key, or None.
    """
    count = get(key)
    if count is None:
        return None
    found = [get(f"{key}/{index}") for index in range(int(count))]
    return b"".join(chunk for chunk in found if chunk is not None)
