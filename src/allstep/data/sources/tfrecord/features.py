"""From a tf.train.Example to a sample: which feature is the image, which the label, and how they
are read.

```
known by themselves     data                                       target
  image/raw             uint8 pixels, shape in image/shape         label (from 0) image/encoded
  bytes of a JPEG or PNG                     image/class/label (from 1: target = label - 1), label
  image                 the same                                   label image_raw             the
  same; or uint8 pixels, if they are       label
                        height x width x depth bytes
                        image/class/text becomes the field "text" of the records that have it
```

Anything else is said by a map from feature to field: {"jpeg": "data", "age": "target", "name":
"name"}. The fields "data" and "target" are the sample's own, all others go to `Sample.fields`. The
empty map means: no Examples, the data is the record itself.

One value is delivered as itself (int, float, bytes), several as an array (a list for bytes). Data
stays a view of the mapped file.
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


@dataclass(frozen=True)
class RecordLayout:
    """How the records of one set become samples."""

    features: Mapping[str, str]
    labels_from: int
    num_classes: int | None = None
    labeling: Labeling = AS_NUMBERS

    @cached_property
    def wanted(self) -> frozenset[str]:
        """The features that must be read."""
        return frozenset((*self.features, *self._sides))

    @cached_property
    def own(self) -> frozenset[str]:
        """The features that become the data and the target; all others are further ones."""
        main = {feature for feature, field in self.features.items() if field in ("data", "target")}
        return frozenset(main.union(self._sides))

    @cached_property
    def _sides(self) -> tuple[str, ...]:
        """The features that hold the size of decoded pixels."""
        return (SHAPE,) if self.is_raw else _SIDES if self.features.get(_TUTORIAL) == "data" else ()

    @cached_property
    def is_raw(self) -> bool:
        """Whether the data is decoded pixels."""
        return self.features.get(PIXELS) == "data"

    @cached_property
    def label(self) -> str | None:
        """The feature that is the target."""
        return next(
            (feature for feature, field in self.features.items() if field == "target"), None
        )

    def sample(self, record: memoryview) -> Sample:
        """The sample in `record`; ValueError when it is not there or cannot be right."""
        if not self.features:
            return Sample(record)
        found = example.decode(record, self.wanted)
        values = {
            field: self._value(found, feature, field) for feature, field in self._fields_in(found)
        }
        return Sample(values.pop("data", None), values.pop("target", 0), values)

    def target(self, value: Any) -> Any:
        """The target that a label stands for; ValueError when there is no such class."""
        # The usual case first: many small records are read by the thousand.
        if not isinstance(value, int) or self.labeling.kind != NUMBERS:
            value = self.labeling.value(value)
            if not isinstance(value, int) or self.labeling.is_named:
                return value
        target = value - self.labels_from
        if target < 0 and (self.labels_from or self.num_classes):
            hint = "; labels_from=0 if they begin with 0" if self.labels_from else ""
            raise ValueError(
                f"its label is {value}, expected labels from {self.labels_from} on{hint}"
            )
        if self.num_classes and target >= self.num_classes:
            last = self.num_classes - 1 + self.labels_from
            raise ValueError(f"its label is {value}, expected {self.labels_from} to {last}")
        return target

    def _fields_in(self, found: Mapping[str, example.Value]) -> Iterator[tuple[str, str]]:
        """Features and their fields; the text of a class is no loss where it is missing."""
        return (
            pair
            for pair in self.features.items()
            if pair != (_TEXT, "text") or len(found.get(_TEXT, ()))
        )

    def _value(self, found: Mapping[str, example.Value], feature: str, field: str) -> Any:
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
    features: Mapping[str, str] | None, there: Collection[str], labels_from: int | None
) -> RecordLayout:
    """The layout that was asked for, or the one that the features that are `there` speak of."""
    chosen = recognise(there) if features is None else features
    start = (1 if chosen.get(_FROM_ONE) == "target" else 0) if labels_from is None else labels_from
    return RecordLayout(dict(chosen), start)


def label_in(record: memoryview, feature: str) -> Any:
    """The label that a record stores as `feature`, as `RecordLayout.sample` reads it; None where it
    has none."""
    values = example.decode(record, (feature,)).get(feature, [])
    return _plain(values, "target") if len(values) else None


def recognise(there: Collection[str]) -> dict[str, str]:
    """Which of the features that are `there` is what; DataError when that is not known."""
    image = next((name for name in _IMAGES if name in there), None)
    label = (
        next((name for name in (_FROM_ONE, LABEL) if name in there), None)
        if image == "image/encoded"
        else None
    )
    label = label or next((name for name in _LABELS if name in there), None)
    if image is None or label is None:
        missing = "image" if image is None else "label"
        names = ", ".join(sorted(there)) or "none"
        raise DataError(
            f'no feature is known as the {missing}; features: {names}; name it: features={{"...":'
            ' "data", "...": "target"}'
        )
    return {image: "data", label: "target"} | ({_TEXT: "text"} if _TEXT in there else {})


def _plain(values: example.Value, field: str) -> Any:
    if isinstance(values, np.ndarray):
        return values.item() if len(values) == 1 and field != "data" else values
    if field == "data":
        return values[0] if len(values) == 1 else values
    whole = [bytes(value) for value in values]
    return whole[0] if len(whole) == 1 else whole


def _pixels_or_file(values: example.Value, sides: Sequence[example.Value]) -> Any:
    """TensorFlow's tutorials call both `image_raw`: a JPEG's file, and height x width x depth
    pixels."""
    if isinstance(values, np.ndarray):
        raise ValueError(f"expected bytes in {_TUTORIAL!r}, found numbers")
    shape = [int(side[0]) for side in sides if isinstance(side, np.ndarray) and len(side) == 1]
    is_pixels = len(shape) == len(_SIDES) and min(shape) > 0 and len(values[0]) == math.prod(shape)
    return np.frombuffer(values[0], np.uint8).reshape(shape) if is_pixels else values[0]


def _pixels(pixels: example.Value, sides: example.Value) -> Any:
    if isinstance(pixels, np.ndarray) or not isinstance(sides, np.ndarray):
        raise ValueError(f"expected bytes in {PIXELS!r} and whole numbers in {SHAPE!r}")
    shape = tuple(sides.tolist())
    if len(shape) not in (2, 3) or min(shape) < 1 or len(pixels[0]) != math.prod(shape):
        raise ValueError(f"its {len(pixels[0])} bytes of pixels do not fit its shape {shape}")
    return np.frombuffer(pixels[0], np.uint8).reshape(shape)
