"""From the members of a tar to samples: members that follow each other under one key belong
together.

The index of a tar is made of the columns that come out here:

```
place       per sample: where its first header begins            first   per sample, and the end: the row of its first member
key, keys   per sample, and the end: where its key is in `keys`  extension, start, size   per member; extension by number
```

A stretch that was lost may have held a member of the sample before it, or of the one behind it.
Such a neighbour is good only if it has all the extensions that samples of this shard usually have.
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
    """Takes members in order, and makes the columns of an index of them."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._places: list[int] = []
        self._first: list[int] = []
        self._rows: list[tuple[int, int, int]] = []
        self._extensions: dict[str, int] = {}
        self._lost: dict[int, str] = {}
        self._doubtful: dict[int, str] = {}

    def add(self, found: Member | Lost) -> None:
        """One more member, or what is lost of one."""
        key, extension = _split(found.name)
        if isinstance(found, Lost):
            self._add_lost(found, key)
        elif extension is not None:
            if not self._continues(key):
                self._open(key, found.header)
            self._rows.append(
                (
                    self._extensions.setdefault(extension, len(self._extensions)),
                    found.start,
                    found.size,
                )
            )

    def finish(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The columns, and what else an index must hold."""
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
        """Start and size of all members of each sample."""
        for row in range(len(self._keys)):
            yield [
                (start, size)
                for _, start, size in self._rows[self._first[row] : self._first[row + 1]]
            ]

    def _continues(self, key: bytes) -> bool:
        return bool(self._keys) and key == self._keys[-1] and len(self._keys) - 1 not in self._lost

    def _open(self, key: bytes, place: int) -> None:
        if len(self._keys) - 1 in self._lost:  # the sample that begins here may have begun before
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
        return frozenset(
            extension for extension, _, _ in self._rows[self._first[row] : self._first[row + 1]]
        )


def _split(name: str) -> tuple[bytes, str | None]:
    """Key and extension as WebDataset has them; no extension: not a part of any sample."""
    found = _NAME.fullmatch(name)
    if not found or (found[1].startswith("__") and found[1].endswith("__")):
        return b"", None
    return found[1].encode("utf-8", "surrogateescape"), found[2].lower()
