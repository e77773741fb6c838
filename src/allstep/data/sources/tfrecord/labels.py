"""How the records of a TFRecord shard store their labels.

A few records, evenly spread over the shard, are inspected. If none of them has text, the labels are
numbers. If one has, all records are read: the labels are numbers if every text is an integer, and
otherwise all of them are names. The bytes are those of the scan that builds the index, so a remote
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

_NUM_INSPECTED = 32


@dataclass(frozen=True)
class Records:
    """Offsets and lengths of the records of a shard, and the reason for each lost one by row."""

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    lost: Mapping[int, str]

    def look(self, view: memoryview, feature: str, whole: bool) -> tuple[StoredLabels, bool]:
        """Count the labels that records store as `feature`; return whether all records were read.

        All are read with `whole`, or if one of a few is text. `view` is all bytes of the shard.
        """
        step = 1 if whole else max(1, len(self.offsets) // _NUM_INSPECTED)
        found = self._count(view, feature, step)
        if step > 1 and found.texts:
            return self._count(view, feature, 1), True
        return found, step == 1

    def label(self, view: memoryview) -> str | None:
        """Return the known feature that contains the labels; None if there is none."""
        for row in range(min(len(self.offsets), _NUM_INSPECTED)):
            try:
                return layout_for(None, spans(self._record(view, row, check=True)), None).label
            except (ValueError, DataError):
                continue
        return None

    def _count(self, view: memoryview, feature: str, step: int) -> StoredLabels:
        """Count the labels of every `step`-th record."""
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
        """Return whether the checksum of a record is right."""
        try:
            self._record(view, row, check=True)
        except ValueError:
            return False
        return True

    def _record(self, view: memoryview, row: int, check: bool) -> memoryview:
        if row in self.lost:
            raise ValueError(self.lost[row])
        return data_at(view, int(self.offsets[row]), int(self.lengths[row]), check=check)
