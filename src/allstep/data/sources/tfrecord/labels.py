"""What the records of a TFRecord shard store as their labels.

A few records, evenly spread over the shard, are looked at. Where none of them has text, the shard
has numbers. Where one has, all records are read: an integer in every record is a number, anything
else makes names of all of them. The bytes are those of the walk that builds the index, so a remote
shard is copied once for both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.labels import StoredLabels, Tally
from allstep.data.sources.tfrecord.example import spans
from allstep.data.sources.tfrecord.features import label_in, layout_for
from allstep.data.sources.tfrecord.framing import data_at
from allstep.errors import DataError

_LOOKED_AT = 32


@dataclass(frozen=True)
class Records:
    """Where the records of a shard are."""

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    lost: Mapping[int, str]

    def look(self, view: memoryview, feature: str, whole: bool) -> tuple[StoredLabels, bool]:
        """What records in the bytes `view` store as `feature`, and whether all were read.

        All are read if asked for (`whole`), or if one of a few is text.
        """
        step = 1 if whole else max(1, len(self.offsets) // _LOOKED_AT)
        found = self._count(view, feature, step)
        if step > 1 and found.texts:
            return self._count(view, feature, 1), True
        return found, step == 1

    def label(self, view: memoryview) -> str | None:
        """The feature that holds the labels, by its name; None where it is not known."""
        for row in range(min(len(self.offsets), _LOOKED_AT)):
            try:
                return layout_for(None, spans(self._record(view, row, check=True)), None).label
            except (ValueError, DataError):
                continue
        return None

    def _count(self, view: memoryview, feature: str, step: int) -> StoredLabels:
        tally = Tally()
        for row in range(0, len(self.offsets), step):
            try:
                stored = label_in(self._record(view, row, check=False), feature)
            except ValueError:
                continue
            if stored is not None:
                tally.add(stored, partial(self._is_sound, view, row))
        return tally.stored()

    def _is_sound(self, view: memoryview, row: int) -> bool:
        try:
            self._record(view, row, check=True)
        except ValueError:
            return False
        return True

    def _record(self, view: memoryview, row: int, check: bool) -> memoryview:
        if row in self.lost:
            raise ValueError(self.lost[row])
        return data_at(view, int(self.offsets[row]), int(self.lengths[row]), check=check)
