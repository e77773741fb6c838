"""TFRecord files as a source: any sample of any shard, at once, checked.

```
TFRecordSource
  shards       each one a file (mapped when first read) and its index: offset and length of every
  record      files, index, walk layout       which feature is the image and which the label
  features, example numbers      0..len-1 over all shards in order; which shard, by bisection of
  where each begins
```

**Damage.** A record whose bytes do not agree with their CRC32C is a BadSample, as is one that lacks
a feature or has a label out of range. A stretch of a shard in which no sound record can be found, a
cut-off end too, is one BadSample that says how many bytes are lost: all whole records before and
after it are delivered. With `check=False` the CRC of the data is not computed; nothing else
changes.

`classes.txt` beside the first shard, one name a line, gives `classes`, and with it the range of
labels. Files compressed as a whole are unpacked into the cache first. Remote shards are copied
through the cache once, for their index; then each read is one range.

**Labels** may be int64 or text (`labels`). The walk through a shard looks at the labels of some
records, evenly spread. If one of them is text, all labels of all shards are read, once: only then
it is known whether they are integers or names. Records with int64 labels, the usual case, cost
nothing more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.files import File, Stamp, check_unchanged, open_file, stamp_of
from allstep.data.sources.index import Index, Progress, index_places, indexed, write_index
from allstep.data.sources.label_index import index_with_labels, indexed_labels, labels_entry
from allstep.data.sources.labels import AS_NUMBERS, Labeling, StoredLabels, decide
from allstep.data.sources.shards import Numbering, Where, list_shards, read_classes
from allstep.data.sources.source import BadSample, Block, Place, Sample, Source
from allstep.data.sources.tfrecord import example, raw
from allstep.data.sources.tfrecord.features import RecordLayout, label_in, layout_for
from allstep.data.sources.tfrecord.framing import OVERHEAD, data_at, length_at
from allstep.data.sources.tfrecord.labels import Records
from allstep.data.sources.tfrecord.scan import walk
from allstep.data.sources.unpack import all_content, open_content, packing
from allstep.errors import DataError

KIND = "tfrecord"


def is_tfrecord(name: str) -> bool:
    """Whether a file is called as TFRecord shards are: x.tfrecord, x.tfrecords.gz,
    x.tfrecord-00000-of-00010, train-00000-of-01024."""
    stem = name.removesuffix(".gz").removesuffix(".zlib").removesuffix(".zz")
    first, separator, rest = stem.partition("-of-")
    numbered = bool(separator) and first[-1:].isdigit() and rest.isdigit()
    return ".tfrec" in stem if not numbered else "." not in stem or ".tfrec" in stem


class Shard:
    """One file of records, and its index.

    `label` is the feature of the labels; None: the usual ones, "": there are none.
    """

    def __init__(
        self, where: str, progress: Progress | None = None, *, label: str | None = None
    ) -> None:
        self.where = where
        self.index = indexed(
            where, KIND, lambda: stamp_of(where), lambda: _build(where, label, progress)
        )
        self._offsets, self._lengths = self.index["offset"], self.index["length"]
        self.lost: dict[int, str] = {int(row): reason for row, reason in self.index.extra["lost"]}

    def __len__(self) -> int:
        return len(self._offsets)

    @cached_property
    def file(self) -> File:
        """The file, unpacked if need be; opened when the first record is read."""
        return open_content(self.where, self.index.extra["packed"], self.index.stamp)

    def offset(self, row: int) -> int:
        return int(self._offsets[row])

    def record(self, row: int, check: bool) -> memoryview:
        """The data of record `row`; ValueError when it is damaged."""
        if self.lost and row in self.lost:
            raise ValueError(self.lost[row])
        length = int(self._lengths[row])
        return data_at(
            self.file.read(int(self._offsets[row]), OVERHEAD + length), 0, length, check=check
        )

    def stored_labels(self, feature: str, *, whole: bool = False) -> StoredLabels:
        """What records store as `feature`: of some of them, or of the `whole` shard.

        Counted once, then kept in the index.
        """
        records = Records(self._offsets, self._lengths, self.lost)
        self.index = index_with_labels(
            self.where,
            KIND,
            self.index,
            feature,
            whole,
            lambda view: records.look(view, feature, whole),
        )
        found = indexed_labels(self.index, feature, whole)
        assert found is not None
        return found

    def labels(self, layout: RecordLayout) -> NDArray[np.int64]:
        """The label of each record, -1 where there is none; counted once, then kept in the index."""
        made_for = [layout.label, layout.labels_from, layout.num_classes, *layout.labeling.key()]
        if "label" not in self.index or self.index.extra.get("label") != made_for:
            labels = np.array([self._label(row, layout) for row in range(len(self))], np.int64)
            extra = {**self.index.extra, "label": made_for}
            self.index = Index(
                {**self.index.columns, "label": _smallest(labels)}, extra, self.index.stamp
            )
            any(write_index(place, KIND, self.index) for place in index_places(self.where))
        return self.index["label"].astype(np.int64)

    def _label(self, row: int, layout: RecordLayout) -> int:
        try:
            target = layout.target(label_in(self.record(row, check=False), layout.label or ""))
            return -1 if target is None or isinstance(target, np.ndarray) else int(target)
        except ValueError:
            return -1


class TFRecordSource(Source):
    """The samples of TFRecord shards: a folder, file, pattern, URL or list of them.

    `features` maps features to fields (None: recognised from the first record; {}: records as they
    are). `labels_from` is the smallest label (None: 1 for `image/class/label`, else 0). Labels
    outside `num_classes` (default: as many as `classes.txt` names) are bad. `classes` numbers
    labels that are names where there is no `classes.txt`; `labeling` is what another process found.
    """

    def __init__(
        self,
        where: Where,
        features: Mapping[str, str] | None = None,
        *,
        labels_from: int | None = None,
        num_classes: int | None = None,
        classes: Sequence[str] = (),
        check: bool = True,
        labeling: Labeling | None = None,
        progress: Progress | None = None,
    ) -> None:
        names = list_shards(where, is_tfrecord, "TFRecord files")
        label = None if features is None else _target_in(features)
        self.shards = [Shard(name, progress, label=label) for name in names]
        self._numbers = Numbering(map(len, self.shards))
        self._check = check
        there = self._feature_names() if features is None else ()
        layout = layout_for(features, there, labels_from)
        listed = read_classes(self.shards[0].where)
        self.labeling = labeling or self._decide(layout.label, listed, tuple(classes))
        self.classes = self.labeling.classes or listed
        num_classes = num_classes or len(self.classes) or None
        self.layout = replace(layout, num_classes=num_classes, labeling=self.labeling)
        self._has_moulds = (
            self.layout.is_raw and self.layout.label is not None and len(self.layout.features) <= 2
        )
        self._moulds: dict[int, raw.Mould | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        layout = self.layout
        names, stamps = (
            [shard.where for shard in self.shards],
            [shard.index.stamp for shard in self.shards],
        )
        settings = {
            "labels_from": layout.labels_from,
            "num_classes": layout.num_classes,
            "check": self._check,
        }
        return _reopen, (names, stamps, layout.features, {**settings, "labeling": self.labeling})

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, number: int) -> Sample:
        shard, row = self._locate(number)
        try:
            record = shard.record(row, self._check)
            sample = raw.single(record, self.layout, self._moulds) if self._has_moulds else None
            return sample or self.layout.sample(record)
        except ValueError as error:
            raise BadSample(number, self.place(number), str(error)) from error

    def place(self, number: int) -> Place:
        shard, row = self._locate(number)
        return Place(shard.where, shard.offset(row))

    def block(self, numbers: NDArray[np.int64]) -> Block | None:
        if not self._has_moulds or not len(numbers):
            return None
        try:
            located = [self._locate(number) for number in numbers.tolist()]
            found = raw.gather(
                [shard.record(row, self._check) for shard, row in located],
                self.layout,
                self._moulds,
            )
        except ValueError:
            return None
        return Block(*found) if found else None

    def targets(self) -> NDArray[np.int64]:
        return np.concatenate([shard.labels(self.layout) for shard in self.shards])

    def close(self) -> None:
        for shard in self.shards:
            shard.__dict__.pop("file", None)  # the last view of it unmaps it

    def _locate(self, number: int) -> tuple[Shard, int]:
        which, row = self._numbers.locate(number)
        return self.shards[which], row

    def _decide(
        self, feature: str | None, listed: tuple[str, ...], given: tuple[str, ...]
    ) -> Labeling:
        """How labels are stored.

        A shard that has text asks for the whole truth about all of them.
        """
        if feature is None:
            return AS_NUMBERS
        stored = [shard.stored_labels(feature) for shard in self.shards]
        if any(each.texts for each in stored):
            stored = [shard.stored_labels(feature, whole=True) for shard in self.shards]
        return decide(feature, stored, listed, given)

    def _feature_names(self) -> set[str]:
        """Of the first record that can be read."""
        reason = "has no record"
        for number in range(min(len(self), 1000)):
            shard, row = self._locate(number)
            try:
                return set(example.spans(shard.record(row, check=True)))
            except ValueError as error:
                reason = f"has no good record among the first {number + 1}; the last one: {error}"
        raise DataError(f"{self.shards[0].where}: {reason}")


def _reopen(
    names: list[str], stamps: list[Stamp], features: Mapping[str, str], settings: Mapping[str, Any]
) -> TFRecordSource:
    source = TFRecordSource(names, features, **settings)
    check_unchanged(names, stamps, [shard.index.stamp for shard in source.shards])
    return source


def _smallest(labels: NDArray[np.int64]) -> NDArray[Any]:
    """In half the bytes, where they fit."""
    fit = not len(labels) or (labels.min() >= -(1 << 31) and labels.max() < 1 << 31)
    return labels.astype(np.int32) if fit else labels


def _target_in(features: Mapping[str, str]) -> str:
    return next((feature for feature, field in features.items() if field == "target"), "")


def _build(where: str, label: str | None, progress: Progress | None) -> Index:
    """Walks a shard, whatever it is: plain or packed, here or remote."""
    file = open_file(where)
    packed = _is_packed(file)
    with all_content(file, packed) as view:
        size = len(view)
        found = walk(view, (lambda done: progress(where, done, size)) if progress else None)
        columns: dict[str, NDArray[Any]] = {
            "offset": np.frombuffer(found.offsets, np.uint64),
            "length": np.frombuffer(found.lengths, np.uint32),
        }
        labels = _look_at_labels(
            Records(columns["offset"], columns["length"], found.lost), view, label
        )
    if progress:
        progress(where, size, size)
    return Index(
        columns, {"packed": packed, "lost": sorted(found.lost.items()), **labels}, file.stamp
    )


def _look_at_labels(records: Records, view: memoryview, label: str | None) -> dict[str, Any]:
    """What the index keeps of the labels; nothing where it is not known which feature they are."""
    feature = records.label(view) if label is None else label
    return labels_entry(feature, *records.look(view, feature, whole=False)) if feature else {}


def _is_packed(file: File) -> bool:
    """Whether the file is compressed: it looks so, and does not begin with a sound record."""
    head = file.read(0, 12)
    if packing(head) is None:
        return False
    try:
        length_at(memoryview(bytes(head) + bytes(4)), 0)
    except ValueError as error:
        return "cut off" not in str(error)
    return False
