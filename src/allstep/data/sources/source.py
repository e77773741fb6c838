"""The interface of all sources: samples with numbers, each of which can be read in constant time.

```
len(source)             number of samples
source.read(number)     -> Sample(data, target, fields); raises BadSample for a damaged one
source.block(numbers)   -> Block(data, target) | None: many at once, if samples are arrays of one
                           shape
source.place(number)    -> Place(file, offset): where it is stored, for messages and the list of
                           bad samples
source.classes          names of the classes, or ()
source.labeling         how labels are stored and names numbered (`labels`)
```

`data` is the stored content: the bytes of an encoded image (any object with the buffer protocol),
or an array (height, width, channels) or (height, width). A source does not decode. `target` is the
class number, or the array that the dataset stores for a sample. `fields` contains further features
by name.

Many threads may read a source at once; it has no position. A pickled source is a description: the
process that unpickles it opens the files again.
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
    """Where a sample is stored: a file (or URL), and the offset of its first byte in it."""

    file: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.file} at byte {self.offset}"


class BadSample(DataError):
    """The error of reading a sample that is damaged, or whose label is wrong.

    Loaders skip such samples up to a limit; other callers may report them to the user.
    """

    def __init__(self, number: int, place: Place, reason: str) -> None:
        super().__init__(f"sample {number} ({place}): {reason}")
        self.number, self.place, self.reason = number, place, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.number, self.place, self.reason)

    def to_json(self) -> dict[str, Any]:
        """Return the values of one line of a list of bad samples."""
        return {
            "number": self.number,
            "file": self.place.file,
            "offset": self.place.offset,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a source: stored data, target (default 0), and further fields by name."""

    data: Any
    target: Any = 0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Block:
    """Samples that are arrays of one shape, stacked.

    `data` has shape (n, height, width[, channels]), `target` (n, ...).
    """

    data: NDArray[Any]
    target: NDArray[Any]


class Source(ABC):
    """Base class of all sources, which read samples by number."""

    classes: tuple[str, ...] = ()
    """Names of the classes, in label order; () if they are not known."""
    labeling: Labeling = AS_NUMBERS
    """How labels are stored, and how names are numbered."""
    notes: tuple[str, ...] = ()
    """Lines for the user about a dataset that can be read, such as files that were left out."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, number: int) -> Sample:
        """Return sample `number`, of 0..len-1.

        Raise BadSample if it is damaged, IndexError if there is no such number.
        """

    @abstractmethod
    def place(self, number: int) -> Place:
        """Return where sample `number` is stored; quick, since the sample is not read."""

    def block(self, numbers: NDArray[np.int64]) -> Block | None:
        """Return the samples `numbers` as stacked arrays.

        None if this source has no such samples, or if one of them is bad; `read` then raises for
        the bad one.
        """
        return None

    def targets(self) -> NDArray[np.int64]:
        """Return the class of every sample, -1 for one without a class or that cannot be read.

        Many sources know it without reading the data.
        """
        return np.array([self._class_of(number) for number in range(len(self))], np.int64)

    def describe_labels(self) -> str:
        """Return one line: how labels are stored, and how names are numbered."""
        return self.labeling.describe()

    def _class_of(self, number: int) -> int:
        try:
            target = self.read(number).target
        except BadSample:
            return -1
        return int(target) if isinstance(target, int | np.integer) else -1

    # Not abstract: most sources have nothing to close.
    def close(self) -> None:  # noqa: B027
        """Close open files. The caller must not read afterwards."""
