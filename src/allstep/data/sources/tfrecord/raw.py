"""A fast path for records of decoded images: read one, or many together.

Records of images of one size that the same program wrote differ in two places only: the pixels and
the label.

```
| fixed | pixels, a fixed number of bytes | fixed | label, a varint | fixed |   (or the label first)
```

So the first record of each length is decoded field by field and becomes a `RecordTemplate`: the
positions of the two places, and the bytes around them. A record that matches the template needs one
comparison and one copy; any other record is decoded field by field.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.source import Sample
from allstep.data.sources.tfrecord.example import next_field, spans
from allstep.data.sources.tfrecord.features import LABEL, PIXELS, RecordLayout

# Different lengths of records: a dataset of images cropped to one longer side has some hundreds.
_MAX_TEMPLATES = 4096
# Tags of the lists of an Example, and of the values in them.
_BYTES_LIST, _INT64_LIST, _VALUE = 0x0A, 0x1A, 0x0A


@dataclass(frozen=True)
class RecordTemplate:
    """What the records of one length have in common."""

    shape: tuple[int, ...]
    """Shape of the image."""
    pixels: slice
    """Bytes of a record that are pixels."""
    label: slice
    """Bytes of a record that are the label."""
    fixed: tuple[tuple[slice, bytes], ...]
    """All other bytes of a record, with their content."""

    def fits(self, record: memoryview) -> bool:
        """Return whether a record matches this template."""
        same = all(record[place] == content for place, content in self.fixed)
        return same and self._is_one_number(record)

    def number(self, record: memoryview) -> int:
        """Return the stored label of a record that matches."""
        value = 0
        for place, byte in enumerate(record[self.label]):
            value |= (byte & 0x7F) << 7 * place
        return value

    def _is_one_number(self, record: memoryview) -> bool:
        """Return whether the bytes of the label are a single varint."""
        *more, last = record[self.label]
        return last < 0x80 and all(byte >= 0x80 for byte in more)


def template_of(record: memoryview, layout: RecordLayout) -> RecordTemplate | None:
    """Return the template of `record`, which must be sound; None if its form is not that simple."""
    found = spans(record, (PIXELS, layout.label or LABEL))
    if len(found) != 2:
        return None
    pixels = _innermost(record, *found[PIXELS], _BYTES_LIST)
    label = _innermost(record, *found[layout.label or LABEL], _INT64_LIST)
    data = layout.sample(record).data
    if not pixels or not label:
        return None
    if pixels.stop - pixels.start != data.size or label.stop - label.start > 4:
        return None
    first, second = sorted((pixels, label), key=lambda place: place.start)
    middle = slice(first.stop, second.start)
    around = (slice(0, first.start), middle, slice(second.stop, len(record)))
    fixed = tuple((place, bytes(record[place])) for place in around)
    return RecordTemplate(data.shape, pixels, label, fixed)


def _innermost(record: memoryview, start: int, stop: int, kind: int) -> slice | None:
    """Return the bytes of the only value of a feature: a number is packed.

    None unless the feature contains one list of this `kind`, and that list one value.
    """
    for expected in (kind, _VALUE):
        if start >= stop:
            return None
        tag, inner, end = next_field(record, start, stop)
        if tag != expected or end != stop:
            return None
        start = inner
    return slice(start, stop) if stop > start else None


def gather(
    records: list[memoryview], layout: RecordLayout, templates: dict[int, RecordTemplate | None]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
    """Return pixels and targets of all `records`, stacked.

    None if they differ in shape or one matches no template. `templates` is a cache by length of the
    record, which the caller keeps.
    """
    data: NDArray[np.uint8] | None = None
    target = np.empty(len(records), np.int64)
    for row, record in enumerate(records):
        template = _template_for(record, layout, templates)
        if template is None or not template.fits(record):
            return None
        if data is None:
            data = np.empty((len(records), *template.shape), np.uint8)
            flat = data.reshape(len(records), -1)
        if template.shape != data.shape[1:]:
            return None
        flat[row] = np.frombuffer(record[template.pixels], np.uint8)
        target[row] = layout.target(template.number(record))
    return None if data is None else (data, target)


def single(
    record: memoryview, layout: RecordLayout, templates: dict[int, RecordTemplate | None]
) -> Sample | None:
    """Return the sample of one record, with a view of its pixels; None if it fits no template."""
    template = _template_for(record, layout, templates)
    if template is None or not template.fits(record):
        return None
    pixels = np.frombuffer(record[template.pixels], np.uint8).reshape(template.shape)
    return Sample(pixels, layout.target(template.number(record)))


def _template_for(
    record: memoryview, layout: RecordLayout, templates: dict[int, RecordTemplate | None]
) -> RecordTemplate | None:
    """Return the template for the length of `record`; the first such record becomes it."""
    if len(record) not in templates:
        # With images of every size, templates bring no gain.
        if len(templates) >= _MAX_TEMPLATES:
            return None
        templates[len(record)] = template_of(record, layout)
    return templates[len(record)]
