"""How the samples of a tar shard store their labels.

```
00012.cls, 00012.txt     text: "3" or "tench"
00012.json               a number or text: "label" or "class" of an object, or the JSON itself
```

A `cls` is always the label. `txt` is often a caption, so it is the label only if it is an integer,
or a name that `classes.txt` lists; `json` is it if its label is an integer or text. Integers take
precedence over names. All labels of a shard are read when its index is built: the headers of a tar
are read then in any case, and the short members are next to them.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.checksum import crc32c
from allstep.data.sources.labels import StoredLabels, Tally, is_integer, text_of

LABELS = ("cls", "txt", "json")
_PLACES = ("extension", "start", "size")
_NUM_INSPECTED = 100


def label_of(extension: str, content: bytes) -> Any:
    """Return the label that a member with this `extension` stores; ValueError if it has none."""
    if extension != "json":
        return content
    value = json.loads(content)
    if not isinstance(value, dict):
        return value
    if not (names := [name for name in ("label", "class") if name in value]):
        raise ValueError(f"its json has neither 'label' nor 'class', only {', '.join(value)}")
    return value[names[0]]


def recognize(members: Mapping[str, memoryview], listed: Collection[str] = ()) -> str | None:
    """Return the extension of the label among the `members` of a sample, or None.

    `listed` are the names of `classes.txt`.
    """
    if "cls" in members:
        return "cls"
    tests: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("txt", is_integer),
        ("json", is_integer),
        ("txt", lambda text: text in listed),
        ("json", lambda text: True),
    )
    for name, is_right in tests:
        if name in members and _is_label(name, members[name], is_right):
            return name
    return None


def _is_label(extension: str, content: memoryview, is_right: Callable[[str], bool]) -> bool:
    """Return whether a member stores an integer, or text for which `is_right` is true."""
    try:
        label = label_of(extension, bytes(content))
        is_text = isinstance(label, bytes | str)
        return isinstance(label, int) or (is_text and is_right(text_of(label)))
    # json raises RecursionError for deeply nested brackets.
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True)
class Members:
    """The members of a shard: the columns of its index, as built by `groups`."""

    columns: Mapping[str, NDArray[Any]]
    extensions: Sequence[str]
    lost: Collection[int]

    def recognize(self, view: memoryview) -> str | None:
        """Return the extension of the labels, from the first samples of the shard, or None.

        `view` is all bytes of the shard.
        """
        for row in range(min(len(self.columns["place"]), _NUM_INSPECTED)):
            if row in self.lost:
                continue
            found = {name: view[a : a + n] for name, a, n in self._members(row)}
            if extension := recognize(found):
                return extension
        return None

    def look(self, view: memoryview, extension: str) -> tuple[StoredLabels, bool]:
        """Count the labels of all samples; return the counts, and True: all were read.

        `view` is all bytes of the shard.
        """
        tally = Tally()
        for row, start, size in self._with(extension):
            try:
                label = label_of(extension, bytes(view[start : start + size]))
            except (ValueError, RecursionError):
                continue
            if row not in self.lost:
                tally.add(label, partial(self._is_sound, view, row))
        return tally.stored(), True

    def _with(self, extension: str) -> Iterable[tuple[int, int, int]]:
        """Return sample, start and size of the members with this `extension`."""
        if extension not in self.extensions:
            return ()
        members = np.flatnonzero(self.columns["extension"] == self.extensions.index(extension))
        rows = np.searchsorted(self.columns["first"], members, "right") - 1
        starts, sizes = (self.columns[name][members].tolist() for name in ("start", "size"))
        return zip(rows.tolist(), starts, sizes, strict=True)

    def _members(self, row: int) -> Iterator[tuple[str, int, int]]:
        """Yield extension, start and size of the members of the sample `row`."""
        first, last = self.columns["first"][row : row + 2].tolist()
        places = (self.columns[name][first:last].tolist() for name in _PLACES)
        for number, start, size in zip(*places, strict=True):
            yield self.extensions[number], start, size

    def _is_sound(self, view: memoryview, row: int) -> bool:
        """Return whether a sample matches its stored checksum; True if none is stored."""
        if "crc" not in self.columns:
            return True
        content = b"".join(view[start : start + size] for _, start, size in self._members(row))
        return bool(crc32c(content) == self.columns["crc"][row])
