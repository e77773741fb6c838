"""Group the members of a tar into samples: consecutive members with the same key are one sample.

The result is the columns of the index of a tar:

```
place                     per sample: offset of its first header
first                     per sample, and the end: row of its first member
key                       per sample, and the end: offset of its key in `keys`
keys                      all keys as bytes
extension, start, size    per member: number of its extension, offset and size of its content
```

A lost range of the file may have contained a member of the sample before or after it. Such a
neighbor is good only if it has all extensions that most samples of the shard have.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.tar.scan import Lost, Member

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)


class Groups:
    """Collects the members of a tar in order, and builds the columns of its index."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._places: list[int] = []
        self._first: list[int] = []
        self._rows: list[tuple[int, int, int]] = []
        self._extensions: dict[str, int] = {}
        self._lost: dict[int, str] = {}
        self._doubtful: dict[int, str] = {}

    def add(self, found: Member | Lost) -> None:
        """Add the next member, or the next lost range."""
        key, extension = _split(found.name)
        if isinstance(found, Lost):
            self._add_lost(found, key)
        elif extension is not None:
            if not self._continues(key):
                self._open(key, found.header)
            number = self._extensions.setdefault(extension, len(self._extensions))
            self._rows.append((number, found.start, found.size))

    def finish(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the columns of the index, and its further values ("lost" and "extensions")."""
        self._first.append(len(self._rows))
        self._settle_doubts()
        rows = np.array(self._rows, np.uint64).reshape(-1, 3)
        columns: dict[str, NDArray[Any]] = {
            "place": np.array(self._places, np.uint64),
            "first": np.array(self._first, np.uint64),
            "extension": rows[:, 0].astype(np.min_scalar_type(max(0xFFFF, len(self._extensions)))),
            "start": rows[:, 1],
            "size": rows[:, 2],
            "key": np.cumsum([0, *map(len, self._keys)], dtype=np.uint64),
            "keys": np.frombuffer(b"".join(self._keys), np.uint8),
        }
        return columns, {"lost": sorted(self._lost.items()), "extensions": list(self._extensions)}

    def spans(self) -> Iterator[list[tuple[int, int]]]:
        """Yield, for each sample, start and size of all of its members."""
        for row in range(len(self._keys)):
            yield [(start, size) for _, start, size in self._members(row)]

    def _members(self, row: int) -> list[tuple[int, int, int]]:
        """Return extension, start and size of the members of the sample `row`."""
        return self._rows[self._first[row] : self._first[row + 1]]

    def _continues(self, key: bytes) -> bool:
        """Return whether a member with this key belongs to the last sample."""
        return bool(self._keys) and key == self._keys[-1] and len(self._keys) - 1 not in self._lost

    def _open(self, key: bytes, place: int) -> None:
        """Begin a new sample."""
        # After a lost range, the sample may have begun in that range.
        if len(self._keys) - 1 in self._lost:
            self._doubtful[len(self._keys)] = self._lost[len(self._keys) - 1]
        self._keys.append(key)
        self._places.append(place)
        self._first.append(len(self._rows))

    def _add_lost(self, found: Lost, key: bytes) -> None:
        if not key and self._keys:
            self._doubtful[len(self._keys) - 1] = found.reason
        if not key or not self._continues(key):
            self._open(key, found.header)
        self._lost[len(self._keys) - 1] = found.reason

    def _settle_doubts(self) -> None:
        """Mark the doubtful samples as lost that lack an extension which most samples have."""
        doubtful = {row: reason for row, reason in self._doubtful.items() if row not in self._lost}
        if not doubtful:
            return
        sure = (
            row for row in range(len(self._keys)) if row not in self._lost and row not in doubtful
        )
        usual = Counter(self._extensions_of(row) for row in sure).most_common(1)
        for row, reason in doubtful.items():
            if not usual or not self._extensions_of(row) >= usual[0][0]:
                self._lost[row] = f"a part of it is lost: {reason}"

    def _extensions_of(self, row: int) -> frozenset[int]:
        return frozenset(extension for extension, _, _ in self._members(row))


def _split(name: str) -> tuple[bytes, str | None]:
    """Return key and extension of a member by WebDataset's rules; no extension: in no sample."""
    found = _NAME.fullmatch(name)
    if not found or (found[1].startswith("__") and found[1].endswith("__")):
        return b"", None
    return found[1].encode("utf-8", "surrogateescape"), found[2].lower()
