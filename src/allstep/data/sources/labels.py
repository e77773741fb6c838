"""How a dataset stores its labels, decided once for all of its samples.

```
stored                              kind      example            target
numbers: int64, JSON's              NUMBERS   3                  the number minus labels_from
text, an integer in 95% of samples  INTEGERS  b"3", b"+3", "03"  the number minus labels_from
other text                          NAMES     b"tench", b"12"    line of classes.txt, or sorted
```

`Tally` counts the kinds of labels in one shard (`StoredLabels`, stored in the shard's index).
`decide` derives one `Labeling` from all shards. It depends on the files only, so all ranks and
loader workers number labels the same way. If a dataset has numbers and text, the more frequent of
the two is its kind (on a tie, the one that comes first). A sample of the other kind is a bad
sample, and so is one with a label that is empty, not text, or a name that `classes.txt` does not
list.

Text is UTF-8 without control characters; spaces and line ends around it are ignored. An integer is
1 to 18 ASCII digits with an optional sign. If `classes.txt` (or the classes of another split) lists
names, texts are integers only if all of them are; without it, up to 5% of other texts are bad
samples: one damaged label must not give all others the number of their place in sorted order. Only
text of samples whose checksum is right counts: one flipped bit in a shard must not turn all of its
integers into names.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from zlib import crc32

from allstep.errors import DataError

NUMBERS, INTEGERS, NAMES = "numbers", "text, integers", "text, class names"
SORTED_ORDER = "sorted order"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
# Includes the characters at which str.splitlines divides: a name must be one line of classes.txt.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SHOWN = 40
_MOSTLY = 0.95
"""Share of integers among the texts from which on the others are bad samples."""


@dataclass(frozen=True)
class StoredLabels:
    """Counts of the labels that the samples of one shard store."""

    numbers: int = 0
    """Labels that are numbers."""
    texts: int = 0
    """Labels that are text or other bytes."""
    text_first: bool = False
    """Whether the first label is text."""
    names: tuple[str, ...] = ()
    """Distinct texts that can be read, sorted."""
    problem: str = ""
    """Why the first unreadable text cannot be read."""
    integers: int = 0
    """Texts that are integers; 0 also in an index that an earlier version wrote."""

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON can hold; `from_json` reverses it."""
        return {**vars(self), "names": list(self.names)}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "StoredLabels":
        """Return the object that `to_json` was called on."""
        return StoredLabels(**{**content, "names": tuple(content["names"])})


class Tally:
    """A count of the labels of one shard, sample by sample."""

    def __init__(self) -> None:
        self._numbers = self._texts = self._integers = 0
        self._text_first = False
        self._names: set[str] = set()
        # Stored bytes whose text is among the names, so that most labels need one lookup, and
        # whether the text is an integer.
        self._known: dict[Any, bool] = {}
        self._problem = ""

    def add(self, stored: Any, is_sound: Callable[[], bool] = lambda: True) -> None:
        """Count one label; `is_sound` checks its sample, and is called only for a new text."""
        if type(stored) is bytes and (is_known_integer := self._known.get(stored)) is not None:
            self._texts += 1
            self._integers += is_known_integer
        elif is_text(stored):
            self._text_first = self._text_first or not self._numbers
            self._texts += 1
            self._add_new(stored, is_sound)
        else:
            self._numbers += 1

    def _add_new(self, stored: Any, is_sound: Callable[[], bool]) -> None:
        try:
            text = text_of(stored)
        except ValueError as error:
            self._problem = self._problem or str(error)
            return
        if text in self._names or is_sound():
            self._names.add(text)
            self._integers += is_integer(text)
            if type(stored) is bytes:
                self._known[stored] = is_integer(text)

    def stored(self) -> StoredLabels:
        """Return the counts so far."""
        names = tuple(sorted(self._names))
        return StoredLabels(
            self._numbers, self._texts, self._text_first, names, self._problem, self._integers
        )


@dataclass(frozen=True)
class Labeling:
    """How the labels of a dataset are stored and numbered."""

    kind: str = NUMBERS
    """NUMBERS, INTEGERS or NAMES."""
    place: str = ""
    """The feature, or the extension in a tar, that contains the label."""
    classes: tuple[str, ...] = ()
    """For NAMES: the names, in label order."""
    order: str = ""
    """For NAMES: what numbers them, such as "classes.txt"; for messages."""
    problem: str = field(default="", compare=False)
    """Why none of the labels can be read; "" if some can."""

    @property
    def is_named(self) -> bool:
        """Return whether labels are class names."""
        return self.kind == NAMES

    def value(self, stored: Any) -> Any:
        """Return the number of a stored label; raise ValueError for a bad label.

        With kind NUMBERS, return the label as it is: it may also be an array.
        """
        if self.kind == NUMBERS:
            if is_text(stored):
                raise ValueError(
                    f"its label is text ({shown(stored)}), expected a number as in most samples"
                )
            return _in_64_bits(stored)
        if not is_text(stored):
            raise ValueError(
                f"its label is a number ({shown(stored)}), expected text as in most samples"
            )
        text = text_of(stored)
        return self._number(text) if self.is_named else _integer(text)

    def _number(self, name: str) -> int:
        """Return the number of a class name; raise ValueError unless there is exactly one."""
        found = self._numbers.get(name, ())
        if len(found) == 1:
            return found[0]
        if found:
            lines = " and ".join(str(number + 1) for number in found)
            raise ValueError(
                f"its label {shown(name)} is the name of {len(found)} classes: lines {lines} of"
                f" {self.order}"
            )
        raise ValueError(
            f"its label {shown(name)} is not one of the {len(self.classes)} names in {self.order}"
        )

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        numbers: dict[str, list[int]] = {}
        for number, name in enumerate(self.classes):
            numbers.setdefault(name.strip(), []).append(number)
        return numbers

    def key(self) -> list[Any]:
        """Return values that differ for labelings that number differently; [] for NUMBERS."""
        return [] if self.kind == NUMBERS else [self.kind, crc32("\n".join(self.classes).encode())]

    def describe(self) -> str:
        """Return one line: where labels are stored, of which kind, and how they are numbered."""
        if self.problem:
            return f"{self.place}: none can be read; the first: {self.problem}"
        if not self.is_named:
            return f"{self.place}: {self.kind}" if self.place else self.kind
        count = sum(is_integer(name) for name in self.classes)
        integers = f", of which {count} are integers" if count else ""
        return (
            f"{self.place}: {self.kind}, numbered by {self.order} ({len(self.classes)}"
            f" classes{integers})"
        )


AS_NUMBERS = Labeling()
"""The labeling of sources that store numbers, or whose labels are not known."""


def decide(
    place: str, shards: Sequence[StoredLabels], listed: tuple[str, ...], given: tuple[str, ...] = ()
) -> Labeling:
    """Return the labeling of a dataset that stores its labels in `place`, from counts per shard.

    Names are numbered by `listed`, the lines of `classes.txt`; without them by `given`, the classes
    of another split; without both by sorted order. If one text is a `given` name, all of them are
    names.
    """
    if not _is_mostly_text(shards):
        return Labeling(NUMBERS, place)
    found = sorted({name for each in shards for name in each.names})
    if not found:
        problem = next((each.problem for each in shards if each.problem), "")
        return Labeling(NAMES, place, listed or given, "classes.txt", problem=problem)
    if all(map(is_integer, found)) and not set(found) & set(given):
        return Labeling(INTEGERS, place)
    if not listed and not given and _are_mostly_integers(shards):
        return Labeling(INTEGERS, place)
    if listed:
        return Labeling(NAMES, place, listed, "classes.txt")
    order = "the given classes" if given else SORTED_ORDER
    return Labeling(NAMES, place, given or tuple(found), order)


def _is_mostly_text(shards: Sequence[StoredLabels]) -> bool:
    """Return whether more labels are text than numbers; on a tie, whether the first one is."""
    numbers, texts = sum(each.numbers for each in shards), sum(each.texts for each in shards)
    text_first = next((each.text_first for each in shards if each.numbers or each.texts), False)
    return texts > numbers or (texts == numbers and text_first)


def _are_mostly_integers(shards: Sequence[StoredLabels]) -> bool:
    """Return whether all but a few texts are integers: those few are damaged, not names."""
    texts, integers = sum(each.texts for each in shards), sum(each.integers for each in shards)
    return integers >= _MOSTLY * texts


def is_text(stored: Any) -> bool:
    """Return whether a label is stored as text or other bytes."""
    return isinstance(stored, bytes | str) or (
        isinstance(stored, list) and bool(stored) and _is_bytes(stored)
    )


def _is_bytes(values: Iterable[Any]) -> bool:
    return all(isinstance(value, bytes) for value in values)


def check_class_names(names: Iterable[str]) -> None:
    """Raise DataError unless each name is one line of text: `classes.txt` has one line per name."""
    for name in names:
        if not _is_line(name):
            # As bytes: the name of a folder may be any bytes.
            shown = os.fsencode(name)
            what = "its name is not one line of text in UTF-8"
            raise DataError(f"class {shown!r}: {what}; rename it and try again")


def _is_line(name: str) -> bool:
    try:
        return f"{name}\n".encode().decode().splitlines() == [name]
    except UnicodeEncodeError:
        return False


def is_integer(text: str) -> bool:
    """Return whether a text is an integer of 1 to 18 digits."""
    return _INTEGER.fullmatch(text) is not None


def text_of(stored: Any) -> str:
    """Return the text of a label without spaces around it; ValueError if empty or not text."""
    if isinstance(stored, list):
        raise ValueError(f"its label has {len(stored)} values, expected one")
    try:
        text = (stored if isinstance(stored, str) else stored.decode()).strip(" \t\r\n")
    except UnicodeDecodeError:
        raise ValueError(
            f"its label is bytes but not text: {shown(stored)}, expected UTF-8"
        ) from None
    if not text:
        raise ValueError("its label is empty, expected an integer or the name of a class")
    if _CONTROL.search(text):
        raise ValueError(f"its label is bytes but not text: {shown(stored)} has control characters")
    return text


def shown(stored: Any) -> str:
    """Return a label for a message: one line, of limited length."""
    text = repr(stored)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _in_64_bits(stored: Any) -> Any:
    """Return `stored`; ValueError for an integer over 64 bits, which no tensor can hold.

    A number in JSON may have thousands of digits.
    """
    if isinstance(stored, int) and not -(1 << 63) <= stored < 1 << 63:
        raise ValueError(
            f"its label has {len(str(abs(stored)))} digits, expected a number of 64 bits"
        )
    return stored


def _integer(text: str) -> int:
    if not is_integer(text):
        raise ValueError(f"its label is {shown(text)}, expected an integer as in all other samples")
    return int(text)
