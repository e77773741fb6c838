"""TFRecord files as a source: random access to every sample of every shard, with checksums.

```
TFRecordSource                                                                modules
  shards     each a file, mapped when first read, and its index: offset and   files, index, scan
             length of every record
  layout     which feature is the image, and which the label                  features, example
  numbers    0..len-1 over all shards in order; bisection finds the shard     shards
```

**Damage.** A record whose bytes do not match their CRC32C is a BadSample, as is one that lacks a
feature or has a label out of range. A range of a shard without a sound record, including a cut end,
is one BadSample with the number of lost bytes; all complete records before and after it are
delivered. With `check=False` the CRC of the data is not computed; nothing else changes.

`classes.txt` next to the first shard, one name per line, gives `classes`, and thereby the range of
labels. Files that are compressed as a whole are first unpacked into the cache. Remote shards are
copied into the cache once, to build their index; then each read requests one range.

**Labels** are int64 or text (`labels`). The scan of a shard inspects the labels of some records,
evenly spread. If one of them is text, all labels of all shards are read once, to determine whether
they are integers or names. Records with int64 labels, the usual case, cost no further reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.index import Index, Progress, index_places, indexed, write_index
from allstep.data.sources.label_index import index_with_labels, indexed_labels, labels_entry
from allstep.data.sources.labels import AS_NUMBERS, SORTED_ORDER, Labeling, StoredLabels, decide
from allstep.data.sources.open_file import File, Stamp, check_unchanged, open_file, stamp_of
from allstep.data.sources.shards import Numbering, Where, list_shards, read_classes
from allstep.data.sources.source import BadSample, Block, Place, Sample, Source
from allstep.data.sources.tfrecord import example, raw
from allstep.data.sources.tfrecord.features import (
    LabelStartUnclear,
    RecordLayout,
    label_in,
    layout_for,
)
from allstep.data.sources.tfrecord.framing import OVERHEAD, data_at, length_at
from allstep.data.sources.tfrecord.labels import Records
from allstep.data.sources.tfrecord.scan import walk
from allstep.data.sources.unpack import all_content, open_content, packing
from allstep.errors import DataError

KIND = "tfrecord"


def is_tfrecord(name: str) -> bool:
    """Return whether a file has the name of a TFRecord shard.

    Such as x.tfrecord, x.tfrecords.gz, x.tfrecord-00000-of-00010 and train-00000-of-01024.
    """
    stem = name.removesuffix(".gz").removesuffix(".zlib").removesuffix(".zz")
    first, separator, rest = stem.partition("-of-")
    numbered = bool(separator) and first[-1:].isdigit() and rest.isdigit()
    return ".tfrec" in stem if not numbered else "." not in stem or ".tfrec" in stem


class Shard:
    """One file of records and its index.

    `label` is the feature of the labels; None means one of the known ones, "" that there is none.
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
        """Return the file, unpacked if it is compressed; it is opened for the first record."""
        return open_content(self.where, self.index.extra["packed"], self.index.stamp)

    def offset(self, row: int) -> int:
        """Return the offset of record `row` in the (unpacked) file."""
        return int(self._offsets[row])

    def record(self, row: int, check: bool) -> memoryview:
        """Return the data of record `row`; ValueError if it is damaged.

        With `check`, its checksum is computed.
        """
        if self.lost and row in self.lost:
            raise ValueError(self.lost[row])
        length = int(self._lengths[row])
        return data_at(
            self.file.read(int(self._offsets[row]), OVERHEAD + length), 0, length, check=check
        )

    def stored_labels(self, feature: str, *, whole: bool = False) -> StoredLabels:
        """Return counts of the labels in `feature`, of some records or of the `whole` shard.

        They are counted once, then stored in the index.
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
        """Return the class of each record, -1 for one without; read once, then in the index."""
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
        except LabelStartUnclear:
            raise _label_start_error(Place(self.where, self.offset(row))) from None
        except ValueError:
            return -1


class TFRecordSource(Source):
    """The samples of TFRecord shards at `where`: a folder, file, pattern, URL or list of these.

    - `features`: field of the sample by feature, such as {"jpeg": "data", "age": "target"}
      (default: known names in the first record; {}: the data is the whole record).
    - `labels_from`: the smallest label (default: 1 for `image/class/label`, else 0).
    - `num_classes`: a target outside 0..num_classes-1 is a BadSample (default: the number of class
      names, if known).
    - `classes`: class names in label order, if labels are names and there is no `classes.txt`.
    - `check`: compare each record with its checksum (default).
    - `labeling`: how labels are stored, as found by another process (default: read from the files).
    - `progress`: a function called with (name, done, total) while an index is built.
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
        present = self._feature_names() if features is None else ()
        layout = layout_for(features, present, labels_from)
        listed, refusal = read_classes(self.shards[0].where)
        self.labeling = labeling or self._decide(layout.label, listed, tuple(classes))
        if refusal and labeling is None and self.labeling.order == SORTED_ORDER:
            raise refusal
        self.classes = self.labeling.classes or listed
        num_classes = num_classes or len(self.classes) or None
        self.layout = replace(layout, num_classes=num_classes, labeling=self.labeling)
        has_label, num_features = self.layout.label is not None, len(self.layout.features)
        self._has_templates = self.layout.is_raw and has_label and num_features <= 2
        self._templates: dict[int, raw.RecordTemplate | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        layout = self.layout
        names = [shard.where for shard in self.shards]
        stamps = [shard.index.stamp for shard in self.shards]
        settings = {
            "labels_from": None if layout.start_is_assumed else layout.labels_from,
            "num_classes": layout.num_classes,
            "check": self._check,
            "labeling": self.labeling,
        }
        return _reopen, (names, stamps, layout.features, settings)

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, number: int) -> Sample:
        shard, row = self._locate(number)
        try:
            record = shard.record(row, self._check)
            layout, templates = self.layout, self._templates
            sample = raw.single(record, layout, templates) if self._has_templates else None
            return sample or layout.sample(record)
        except ValueError as error:
            raise BadSample(number, self.place(number), str(error)) from error
        except LabelStartUnclear:
            raise _label_start_error(self.place(number)) from None

    def place(self, number: int) -> Place:
        shard, row = self._locate(number)
        return Place(shard.where, shard.offset(row))

    def block(self, numbers: NDArray[np.int64]) -> Block | None:
        if not self._has_templates or not len(numbers):
            return None
        try:
            located = [self._locate(number) for number in numbers.tolist()]
            records = [shard.record(row, self._check) for shard, row in located]
            found = raw.gather(records, self.layout, self._templates)
        except (ValueError, LabelStartUnclear):
            return None
        return Block(*found) if found else None

    def targets(self) -> NDArray[np.int64]:
        return np.concatenate([shard.labels(self.layout) for shard in self.shards])

    def close(self) -> None:
        for shard in self.shards:
            # The end of its last view unmaps the file.
            shard.__dict__.pop("file", None)

    def _locate(self, number: int) -> tuple[Shard, int]:
        """Return the shard that contains sample `number`, and its row in the shard."""
        which, row = self._numbers.locate(number)
        return self.shards[which], row

    def _decide(
        self, feature: str | None, listed: tuple[str, ...], given: tuple[str, ...]
    ) -> Labeling:
        """Return how labels are stored and numbered.

        If some labels are text, the labels of all records of all shards are read.
        """
        if feature is None:
            return AS_NUMBERS
        stored = [shard.stored_labels(feature) for shard in self.shards]
        if any(each.texts for each in stored):
            stored = [shard.stored_labels(feature, whole=True) for shard in self.shards]
        return decide(feature, stored, listed, given)

    def _feature_names(self) -> set[str]:
        """Return the names of the features of the first record that can be read."""
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
    """Open the shards of a pickled source; raise DataError if one was changed since."""
    source = TFRecordSource(names, features, **settings)
    check_unchanged(names, stamps, [shard.index.stamp for shard in source.shards])
    return source


def _label_start_error(place: Place) -> DataError:
    """Return the error for a label of 0 where labels usually begin with 1."""
    return DataError(
        f"{place}: its label is 0 in image/class/label, where ImageNet's records begin with 1."
        " State how labels begin here: data.labels_from=0 (in allstep data: --labels-from 0), or 1"
        " to count such samples as bad"
    )


def _smallest(labels: NDArray[np.int64]) -> NDArray[Any]:
    """Return `labels` as int32 if they fit, which takes half the bytes."""
    fit = not len(labels) or (labels.min() >= -(1 << 31) and labels.max() < 1 << 31)
    return labels.astype(np.int32) if fit else labels


def _target_in(features: Mapping[str, str]) -> str:
    """Return the feature of the target, or ""."""
    return next((feature for feature, field in features.items() if field == "target"), "")


def _build(where: str, label: str | None, progress: Progress | None) -> Index:
    """Scan a shard, plain or packed, local or remote, and return its index."""
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
    """Return the index's entry on labels; {} if it is not known which feature they are."""
    feature = records.label(view) if label is None else label
    return labels_entry(feature, *records.look(view, feature, whole=False)) if feature else {}


def _is_packed(file: File) -> bool:
    """Return whether the file is compressed.

    It is if its first bytes look so, and are not the beginning of a sound record.
    """
    head = file.read(0, 12)
    if packing(head) is None:
        return False
    try:
        length_at(memoryview(bytes(head) + bytes(4)), 0)
    except ValueError as error:
        return "cut off" not in str(error)
    return False
