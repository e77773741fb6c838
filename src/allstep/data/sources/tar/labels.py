"""What the samples of a tar shard store as their labels.

```
00012.cls, 00012.txt     text: "3" or "tench"
00012.json               a number or text: "label" or "class" of an object, or the JSON itself
```

A `cls` is always the label. `txt` is often a caption, so it is the label where it is an integer, or
a name that `classes.txt` lists; `json` where its label is an integer or text. Integers go before
names. All labels of a shard are read when its index is built: a tar's headers, next to which the
short members are, are read then in any case.
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
_LOOKED_AT = 100


def label_of(extension: str, content: bytes) -> Any:
    """The label that a member with this `extension` stores; ValueError where it is none."""
    if extension != "json":
        return content
    value = json.loads(content)
    if not isinstance(value, dict):
        return value
    if not (names := [name for name in ("label", "class") if name in value]):
        raise ValueError(f"its json has neither 'label' nor 'class', only {', '.join(value)}")
    return value[names[0]]


def recognise(members: Mapping[str, memoryview], listed: Collection[str] = ()) -> str | None:
    """The extension of the label among the `members` of a sample, or None.

    `listed`: known names.
    """
    if "cls" in members:
        return "cls"
    tests: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("txt", is_integer),
        ("json", is_integer),
        ("txt", lambda text: text in listed),
        ("json", lambda text: True),
    )
    return next(
        (
            name
            for name, is_right in tests
            if name in members and _is_label(name, members[name], is_right)
        ),
        None,
    )


def _is_label(extension: str, content: memoryview, is_right: Callable[[str], bool]) -> bool:
    try:
        label = label_of(extension, bytes(content))
        return isinstance(label, int) or (
            isinstance(label, bytes | str) and is_right(text_of(label))
        )
    except (ValueError, RecursionError):  # the latter: what json says of brackets without end
        return False


@dataclass(frozen=True)
class Members:
    """Where the members of a shard are: the columns of its index, as `groups` makes them."""

    columns: Mapping[str, NDArray[Any]]
    extensions: Sequence[str]
    lost: Collection[int]

    def recognise(self, view: memoryview) -> str | None:
        """The extension of the labels in the bytes `view`, by the first samples that show it, or
        None."""
        for row in range(min(len(self.columns["place"]), _LOOKED_AT)):
            found = (
                {}
                if row in self.lost
                else {name: view[a : a + n] for name, a, n in self._members(row)}
            )
            if extension := recognise(found):
                return extension
        return None

    def look(self, view: memoryview, extension: str) -> tuple[StoredLabels, bool]:
        """What all samples in the bytes `view` store as labels; and that these are all."""
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
        """Sample, start and size of the members with this `extension`."""
        if extension not in self.extensions:
            return ()
        members = np.flatnonzero(self.columns["extension"] == self.extensions.index(extension))
        rows = np.searchsorted(self.columns["first"], members, "right") - 1
        starts, sizes = (self.columns[name][members].tolist() for name in ("start", "size"))
        return zip(rows.tolist(), starts, sizes, strict=True)

    def _members(self, row: int) -> Iterator[tuple[str, int, int]]:
        first, last = self.columns["first"][row : row + 2].tolist()
        for number, start, size in zip(
            *(self.columns[name][first:last].tolist() for name in _PLACES), strict=True
        ):
            yield self.extensions[number], start, size

    def _is_sound(self, view: memoryview, row: int) -> bool:
        """Whether a sample is the one whose checksum was stored, where that was done."""
        if "crc" not in self.columns:
            return True
        content = b"".join(view[start : start + size] for _, start, size in self._members(row))
        return bool(crc32c(content) == self.columns["crc"][row])
