"""The store's keys and values, the operations on them, and their limits.

A faulty rank must not exhaust the memory or the time of the process that serves the store, so each
operation has a limit far above ordinary use:

=====================  ============  ===========================================================
what                   limit         reason
=====================  ============  ===========================================================
all keys and values    1 GiB         1,000 ranks need about 60 MB for each Gloo group
number of keys         262,144       `keys` reads them all, in about 30 ms
one reply              64 MB         a longer one is refused before it is built
`add`                  64 bits       as in torch's stores; no numbers of a thousand digits
`append`               (the total)   the value grows in place, so a call costs what it appends
=====================  ============  ===========================================================

A request beyond a limit raises ValueError with the figures and changes nothing. This module uses no
socket.
"""

from collections.abc import Sequence
from typing import TypeVar

from allstep.wire.frames import LENGTH, MAX_FRAME, Fields, frame_nbytes

MAX_NBYTES = 1 << 30
_MAX_KEYS = 1 << 18
# Memory of an entry besides its bytes: two Python objects and a slot of the dict.
_NBYTES_PER_KEY = 200
_MAX_DIGITS = 20
_INT64 = range(-(1 << 63), 1 << 63)
# Bytes of the field "ok" in front of the values.
_STATUS_NBYTES = LENGTH.size + 2


class Table:
    """The keys and values. Methods named like operations return the values of their reply.

    Args:
        max_nbytes: upper limit of the bytes of all keys and values; each key counts 200 more.
    """

    def __init__(self, max_nbytes: int = MAX_NBYTES) -> None:
        # A value that was appended to is a bytearray, which grows without being copied.
        self.values: dict[bytes, bytes | bytearray] = {}
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        # The new keys since the last call of `take_appeared`.
        self.appeared: list[bytes] = []

    def set(self, key: bytes, value: bytes) -> Fields:
        """Set a key."""
        self._put(key, value)
        return []

    def set_by_owner(self, key: bytes, value: bytes) -> None:
        """Set a key also in a full table, so that the launcher can always report a failure."""
        self._put(key, value, is_bounded=False)

    def add(self, key: bytes, amount: bytes) -> Fields:
        """Add to a counter, which starts at 0; return its new value."""
        total = _integer(self.values.get(key, b"0")) + _integer(amount)
        if total not in _INT64:
            raise ValueError(f"add would make {total}; a counter has 64 bits")
        value = b"%d" % total
        self._put(key, value)
        return [value]

    def append(self, key: bytes, value: bytes) -> Fields:
        """Append to the value of a key; set it if it is absent."""
        old = self.values.get(key)
        if old is None:
            self._put(key, value)
            return []
        nbytes = len(old) + len(value)
        if nbytes > MAX_FRAME - _STATUS_NBYTES - LENGTH.size:
            raise ValueError(f"append would make {nbytes} bytes; a reply holds {MAX_FRAME}")
        self._check_room(len(value))
        self._nbytes += len(value)
        if not isinstance(old, bytearray):
            old = self.values[key] = bytearray(old)
        old += value
        return []

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Fields:
        """Set a key to `desired` if its value is `expected`; return its value afterwards.

        As in torch's stores, an absent key equals an empty `expected`.
        """
        if self.values.get(key, b"") == expected:
            self._put(key, desired)
        return [bytes(self.values.get(key, expected))]

    def check(self, *keys: bytes) -> Fields:
        """Return b"1" if all keys are set, else b"0"."""
        return [b"%d" % all(key in self.values for key in keys)]

    def delete(self, key: bytes) -> Fields:
        """Delete a key; return b"1" if it was set, else b"0"."""
        value = self.values.pop(key, None)
        if value is not None:
            self._nbytes -= len(key) + len(value) + _NBYTES_PER_KEY
        return [b"%d" % (value is not None)]

    def count(self) -> Fields:
        """Return the number of keys."""
        return [b"%d" % len(self.values)]

    def keys(self, prefix: bytes) -> Fields:
        """Return the keys that begin with `prefix`, unsorted: sorting is the client's work."""
        return _fits([key for key in self.values if key.startswith(prefix)])

    def get(self, keys: Sequence[bytes]) -> Fields:
        """Return the values of keys, all of which must be set."""
        return [bytes(value) for value in _fits([self.values[key] for key in keys])]

    def take_appeared(self) -> list[bytes]:
        """Return the new keys since the last call."""
        appeared, self.appeared = self.appeared, []
        return appeared

    def _put(self, key: bytes, value: bytes, is_bounded: bool = True) -> None:
        """Set a key and count its bytes; without `is_bounded` also beyond the limits."""
        old = self.values.get(key)
        if old is None:
            nbytes, num_keys = len(key) + len(value) + _NBYTES_PER_KEY, 1
        else:
            nbytes, num_keys = len(value) - len(old), 0
        if is_bounded:
            self._check_room(nbytes, num_keys)
        if old is None:
            self.appeared.append(key)
        self._nbytes += nbytes
        self.values[key] = value

    def _check_room(self, nbytes: int, num_keys: int = 0) -> None:
        """Raise ValueError if so many more bytes or keys exceed a limit."""
        if nbytes > 0 and self._nbytes + nbytes > self._max_nbytes:
            room = self._max_nbytes - self._nbytes
            raise ValueError(f"{nbytes} bytes do not fit: {room} of {self._max_nbytes} are left")
        if num_keys and len(self.values) >= _MAX_KEYS:
            raise ValueError(f"{len(self.values)} keys are stored, the limit is {_MAX_KEYS}")


def _integer(text: bytes | bytearray) -> int:
    """Return the number that `text` spells; ValueError for more digits than 64 bits have."""
    # The time of int() grows with the square of the digits, and past 4,300 digits it raises.
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits; a counter has 64 bits")
    return int(text)


_Values = TypeVar("_Values", Fields, list[bytes | bytearray])


def _fits(values: _Values) -> _Values:
    """Return `values` if a reply can carry them, else raise ValueError."""
    nbytes = _STATUS_NBYTES + frame_nbytes(values)
    if nbytes > MAX_FRAME:
        raise ValueError(f"a reply of {nbytes} bytes, the limit is {MAX_FRAME}")
    return values
