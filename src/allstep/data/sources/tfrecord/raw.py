"""Records of decoded images, read quickly: one, or many at once.

Records that one packer wrote, of images of one size, differ in two places only: the pixels and
the label.

```
| fixed | pixels, always so many bytes | fixed | label, a varint | fixed |        (or the label first)
```

So the first record of each length is decoded with care and becomes a `Mould`: where the two places
are, and what must stand around them. A record that fits the mould needs one comparison and one
copy; one that does not is decoded with care as well.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.source import Sample
from allstep.data.sources.tfrecord.example import next_field, spans
from allstep.data.sources.tfrecord.features import LABEL, PIXELS, RecordLayout

_MOST_MOULDS = 4096  # lengths of records: images cut to a longer side have some hundreds
_BYTES_LIST, _INT64_LIST, _VALUE = (
    0x0A,
    0x1A,
    0x0A,
)  # tags of example's lists, and of the values in them


@dataclass(frozen=True)
class Mould:
    """What the records of one length have in common."""

    shape: tuple[int, ...]
    pixels: slice
    label: slice
    fixed: tuple[tuple[slice, bytes], ...]

    def fits(self, record: memoryview) -> bool:
        return all(
            record[place] == content for place, content in self.fixed
        ) and self._is_one_number(record)

    def number(self, record: memoryview) -> int:
        """The label of a record that fits."""
        value = 0
        for place, byte in enumerate(record[self.label]):
            value |= (byte & 0x7F) << 7 * place
        return value

    def _is_one_number(self, record: memoryview) -> bool:
        *more, last = record[self.label]
        return last < 0x80 and all(byte >= 0x80 for byte in more)


def mould_of(record: memoryview, layout: RecordLayout) -> Mould | None:
    """The mould that `record`, which must be good, was made with; None where it has no such simple
    form."""
    found = spans(record, (PIXELS, layout.label or LABEL))
    if len(found) != 2:
        return None
    pixels = _innermost(record, *found[PIXELS], _BYTES_LIST)
    label = _innermost(record, *found[layout.label or LABEL], _INT64_LIST)
    data = layout.sample(record).data
    if (
        not pixels
        or not label
        or pixels.stop - pixels.start != data.size
        or label.stop - label.start > 4
    ):
        return None
    first, second = sorted((pixels, label), key=lambda place: place.start)
    around = (
        slice(0, first.start),
        slice(first.stop, second.start),
        slice(second.stop, len(record)),
    )
    return Mould(
        data.shape, pixels, label, tuple((place, bytes(record[place])) for place in around)
    )


def _innermost(record: memoryview, start: int, stop: int, kind: int) -> slice | None:
    """The only value of a feature: the list in the feature, and the value (packed, for a number) in
    the list; each alone in the other."""
    for expected in (kind, _VALUE):
        if start >= stop:
            return None
        tag, inner, end = next_field(record, start, stop)
        if tag != expected or end != stop:
            return None
        start = inner
    return slice(start, stop) if stop > start else None


def gather(
    records: list[memoryview], layout: RecordLayout, moulds: dict[int, Mould | None]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
    """Pixels and targets of all `records`, stacked; None when they differ in shape or fit no mould.

    The caller keeps `moulds`.
    """
    data: NDArray[np.uint8] | None = None
    target = np.empty(len(records), np.int64)
    for row, record in enumerate(records):
        mould = _mould_for(record, layout, moulds)
        if mould is None or not mould.fits(record):
            return None
        if data is None:
            data = np.empty((len(records), *mould.shape), np.uint8)
            flat = data.reshape(len(records), -1)
        if mould.shape != data.shape[1:]:
            return None
        flat[row] = np.frombuffer(record[mould.pixels], np.uint8)
        target[row] = layout.target(mould.number(record))
    return None if data is None else (data, target)


def single(
    record: memoryview, layout: RecordLayout, moulds: dict[int, Mould | None]
) -> Sample | None:
    """One record, its pixels where they lie; None when it fits no mould, and must be decoded with
    care."""
    mould = _mould_for(record, layout, moulds)
    if mould is None or not mould.fits(record):
        return None
    pixels = np.frombuffer(record[mould.pixels], np.uint8).reshape(mould.shape)
    return Sample(pixels, layout.target(mould.number(record)))


def _mould_for(
    record: memoryview, layout: RecordLayout, moulds: dict[int, Mould | None]
) -> Mould | None:
    if len(record) not in moulds:
        if len(moulds) >= _MOST_MOULDS:  # images of every size: nothing to gain here
            return None
        moulds[len(record)] = mould_of(record, layout)
    return moulds[len(record)]
