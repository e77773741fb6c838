"""What every source of samples is: a numbered collection from which any sample can be read at once.

```
Source      len(source)                how many samples
            source.read(number)        -> Sample(data, target, fields)      BadSample when it cannot
            be given as good source.block(numbers)      -> Block(data, target) | None        many at
            once, where samples are equal arrays source.place(number)       -> Place(file, offset)
            where it lies, for messages and the quarantine list source.classes             names of
            the classes, or () source.labeling            how labels are stored, and names numbered
            labels
```

`data` is what was stored: the bytes of an encoded image (anything with the buffer protocol), or
an array (height, width, channels) or (height, width). Decoding is not a source's work. `target` is
the class number, or whatever array the set stores for one sample. `fields` holds further features
by name.

A source is read from many threads at once and holds no position. Pickled, it is a description: the
process that unpickles it opens the files anew.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.labels import AS_NUMBERS, Labeling
from allstep.errors import DataError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample lies: a file (or URL), and the byte in it where the sample begins."""

    file: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.file} at byte {self.offset}"


class BadSample(DataError):
    """One sample that cannot be delivered as good.

    Loaders skip it within a budget; everybody else may show it to the user.
    """

    def __init__(self, number: int, place: Place, reason: str) -> None:
        super().__init__(f"sample {number} ({place}): {reason}")
        self.number, self.place, self.reason = number, place, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.number, self.place, self.reason)

    def to_json(self) -> dict[str, Any]:
        """Plain values: what a line of every list of bad samples holds."""
        return {
            "number": self.number,
            "file": self.place.file,
            "offset": self.place.offset,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Sample:
    """What a source has under one number."""

    data: Any
    target: Any = 0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Block:
    """Samples that are arrays of one shape, stacked:

    `data` (n, height, width[, channels]), `target` (n, ...).
    """

    data: NDArray[Any]
    target: NDArray[Any]


class Source(ABC):
    """Samples by number."""

    classes: tuple[str, ...] = ()
    labeling: Labeling = AS_NUMBERS
    notes: tuple[str, ...] = ()
    """Lines for the user about a set that can be read, such as files that were left out."""

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def read(self, number: int) -> Sample:
        """Sample `number`, of 0..len-1.

        Raises BadSample when it is damaged, IndexError when there is no such number.
        """

    @abstractmethod
    def place(self, number: int) -> Place:
        """Where sample `number` lies; cheap, and without reading it."""

    def block(self, numbers: NDArray[np.int64]) -> Block | None:
        """The samples at `numbers` in one go; None where this source cannot, or when one of them is
        bad (`read` then says which)."""
        return None

    def targets(self) -> NDArray[np.int64]:
        """The class of every sample, -1 where it has none or cannot be read.

        Many sources know it without reading the data.
        """
        return np.array([self._class_of(number) for number in range(len(self))], np.int64)

    def describe_labels(self) -> str:
        """One line: how labels are stored, and how names are numbered."""
        return self.labeling.describe()

    def _class_of(self, number: int) -> int:
        try:
            target = self.read(number).target
        except BadSample:
            return -1
        return int(target) if isinstance(target, int | np.integer) else -1

    def close(self) -> None:  # noqa: B027  # most sources have nothing to let go of
        """Lets go of open files. Reading afterwards is an error of the caller."""
