"""From a tf.train.Example to a sample: which feature is the image, which the label, and how they
are read.

```
known feature    data                                      target
image/raw        uint8 pixels, shape in image/shape        label (from 0)
image/encoded    bytes of a JPEG or PNG                    image/class/label (from 1: target =
                                                           label - 1), or label
image            bytes of a JPEG or PNG                    label
image_raw        bytes of a JPEG or PNG; or uint8 pixels   label
                 if they are height x width x depth bytes
```

image/class/text becomes the field "text" of the records that have it.

For other features, the user gives a mapping from feature to field: {"jpeg": "data", "age":
"target", "name": "name"}. The fields "data" and "target" are those of the sample, all others go to
`Sample.fields`. The empty mapping means that records are no Examples: the data is the record
itself.

A single value is delivered as such (int, float, bytes), several as an array (a list for bytes).
Data stays a view of the mapped file.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from allstep.data.sources.labels import AS_NUMBERS, NUMBERS, Labeling
from allstep.data.sources.source import Sample
from allstep.data.sources.tfrecord import example
from allstep.errors import DataError

PIXELS, SHAPE, LABEL = "image/raw", "image/shape", "label"
_FROM_ONE = "image/class/label"
_TEXT = "image/class/text"
_TUTORIAL = "image_raw"
_SIDES = ("height", "width", "depth")
_IMAGES = (PIXELS, "image/encoded", "image", _TUTORIAL)
_LABELS = (LABEL, _FROM_ONE)


class LabelStartUnclear(Exception):
    """A label is 0 in image/class/label, whose labels begin with 1 in ImageNet's records.

    Other converters begin with 0 there. Only the user knows which of them wrote the records.
    """


@dataclass(frozen=True)
class RecordLayout:
    """How the records of a dataset become samples."""

    features: Mapping[str, str]
    """Field of the sample by feature, such as {"image": "data", "label": "target"}."""
    labels_from: int
    """The smallest stored label: target = label - labels_from."""
    num_classes: int | None = None
    """Targets are 0..num_classes-1; None if the number is not known."""
    start_is_assumed: bool = False
    """Whether `labels_from` is the convention for image/class/label, not the user's choice."""
    labeling: Labeling = AS_NUMBERS

    @cached_property
    def wanted(self) -> frozenset[str]:
        """Return the features that must be read."""
        return frozenset((*self.features, *self._sides))

    @cached_property
    def own(self) -> frozenset[str]:
        """Return the features from which data and target are read."""
        main = {feature for feature, field in self.features.items() if field in ("data", "target")}
        return frozenset(main.union(self._sides))

    @cached_property
    def _sides(self) -> tuple[str, ...]:
        """Return the features that contain the size of decoded pixels."""
        return (SHAPE,) if self.is_raw else _SIDES if self.features.get(_TUTORIAL) == "data" else ()

    @cached_property
    def is_raw(self) -> bool:
        """Return whether the data is decoded pixels."""
        return self.features.get(PIXELS) == "data"

    @cached_property
    def label(self) -> str | None:
        """Return the feature of the target; None if there is none."""
        return next(
            (feature for feature, field in self.features.items() if field == "target"), None
        )

    def sample(self, record: memoryview) -> Sample:
        """Return the sample in `record`; ValueError if a feature is missing or wrong."""
        if not self.features:
            return Sample(record)
        found = example.decode(record, self.wanted)
        values = {
            field: self._value(found, feature, field) for feature, field in self._fields_in(found)
        }
        return Sample(values.pop("data", None), values.pop("target", 0), values)

    def target(self, value: Any) -> Any:
        """Return the target of a stored label; ValueError if there is no such class."""
        # The usual case first: records may be small, and are read by the thousand.
        if not isinstance(value, int) or self.labeling.kind != NUMBERS:
            value = self.labeling.value(value)
            if not isinstance(value, int) or self.labeling.is_named:
                return value
        target = value - self.labels_from
        first = self.labels_from
        if value == 0 and self.start_is_assumed:
            raise LabelStartUnclear
        if target < 0 and (first or self.num_classes):
            hint = "; labels_from=0 if they begin with 0" if first else ""
            raise ValueError(f"its label is {value}, expected labels from {first} on{hint}")
        if self.num_classes and target >= self.num_classes:
            last = self.num_classes - 1 + first
            raise ValueError(f"its label is {value}, expected {first} to {last}")
        return target

    def _fields_in(self, found: Mapping[str, example.Value]) -> Iterator[tuple[str, str]]:
        """Return (feature, field) pairs, without the text of a class if a record has none."""
        return (
            pair
            for pair in self.features.items()
            if pair != (_TEXT, "text") or len(found.get(_TEXT, ()))
        )

    def _value(self, found: Mapping[str, example.Value], feature: str, field: str) -> Any:
        """Return the value of a feature as its field delivers it; ValueError if there is none."""
        if feature not in found:
            raise ValueError(f"has no feature {feature!r}")
        values = found[feature]
        if not len(values):
            raise ValueError(f"its feature {feature!r} has no value")
        if feature == PIXELS and field == "data":
            return _pixels(values, found.get(SHAPE, []))
        if feature == _TUTORIAL and field == "data":
            return _pixels_or_file(values, [found.get(side, []) for side in _SIDES])
        value = _plain(values, field)
        return self.target(value) if field == "target" else value


def layout_for(
    features: Mapping[str, str] | None, present: Collection[str], labels_from: int | None
) -> RecordLayout:
    """Return the layout with the given `features`, else with known ones among those `present`.

    `labels_from` is the smallest label (None: 1 for image/class/label, else 0).
    """
    chosen = recognize(present) if features is None else features
    is_from_one = labels_from is None and chosen.get(_FROM_ONE) == "target"
    start = int(is_from_one) if labels_from is None else labels_from
    return RecordLayout(dict(chosen), start, start_is_assumed=is_from_one)


def label_in(record: memoryview, feature: str) -> Any:
    """Return the label that a record stores as `feature`, as `RecordLayout.sample` reads it.

    None if it has none.
    """
    values = example.decode(record, (feature,)).get(feature, [])
    return _plain(values, "target") if len(values) else None


def recognize(present: Collection[str]) -> dict[str, str]:
    """Return the field of each known feature among those `present`.

    Raise DataError if there is no known image or label.
    """
    image = next((name for name in _IMAGES if name in present), None)
    labels = (_FROM_ONE, LABEL) if image == "image/encoded" else _LABELS
    label = next((name for name in labels if name in present), None)
    if image is None or label is None:
        missing = "image" if image is None else "label"
        names = ", ".join(sorted(present)) or "none"
        raise DataError(
            f"no feature is known as the {missing}; features: {names}; give its name:"
            ' features={"...": "data", "...": "target"}'
        )
    return {image: "data", label: "target"} | ({_TEXT: "text"} if _TEXT in present else {})


def _plain(values: example.Value, field: str) -> Any:
    """Return a single value as such, several as an array or list; data stays an array or view."""
    if isinstance(values, np.ndarray):
        return values.item() if len(values) == 1 and field != "data" else values
    if field == "data":
        return values[0] if len(values) == 1 else values
    whole = [bytes(value) for value in values]
    return whole[0] if len(whole) == 1 else whole


def _pixels_or_file(values: example.Value, sides: Sequence[example.Value]) -> Any:
    """Return pixels if the sides match the number of bytes, else the bytes of an encoded image.

    TensorFlow's tutorials use `image_raw` for both.
    """
    if isinstance(values, np.ndarray):
        raise ValueError(f"expected bytes in {_TUTORIAL!r}, found numbers")
    shape = [int(side[0]) for side in sides if isinstance(side, np.ndarray) and len(side) == 1]
    is_pixels = len(shape) == len(_SIDES) and min(shape) > 0 and len(values[0]) == math.prod(shape)
    return np.frombuffer(values[0], np.uint8).reshape(shape) if is_pixels else values[0]


def _pixels(pixels: example.Value, sides: example.Value) -> Any:
    """Return the pixels of `image/raw` in the shape of `image/shape`."""
    if isinstance(pixels, np.ndarray) or not isinstance(sides, np.ndarray):
        raise ValueError(f"expected bytes in {PIXELS!r} and integers in {SHAPE!r}")
    shape = tuple(sides.tolist())
    if len(shape) not in (2, 3) or min(shape) < 1 or len(pixels[0]) != math.prod(shape):
        raise ValueError(f"its {len(pixels[0])} bytes of pixels do not fit its shape {shape}")
    return np.frombuffer(pixels[0], np.uint8).reshape(shape)
