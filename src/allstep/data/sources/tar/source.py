"""Tar shards with WebDataset's naming, with random access to every sample of every shard.

```
00012.jpg  00012.cls  00012.json | 00013.jpg  00013.cls ...
|------- sample 00012 --------|

members of one sample are consecutive
key          the path up to the first dot of the file name
extension    the rest of the file name after that dot
```

The member with the extension of an image (jpg, jpeg, png, webp, ppm, ...) is the data. The target
is `cls`, else a number in `txt` or `json` ("label" or "class" of an object), else a class name in
them (`labels`). All other members go to `fields` by extension, and the key as `__key__`. The index
contains the offset of each member, so a read touches only the members of its sample. Long names of
GNU and POSIX (pax) are supported.

A tar has checksums of its headers only, not of its content. A shard with a damaged header or a cut
end delivers all other samples; each lost range is one BadSample. In a packed shard (`x.tar.gz`)
whose compressed bytes are damaged, every sample is a BadSample, since it is unknown which are
right. `checksum=True` stores a CRC32C per sample in the index, and every read is compared with it,
also after the shard was changed; `again=True` stores new ones. For samples without a label, pass
`target=""`: their target is then 0.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep import faults
from allstep.data.sources.checksum import crc32c_on
from allstep.data.sources.class_folders import IMAGES as SUFFIXES
from allstep.data.sources.index import Index, Progress, indexed, not_as_stored, stored_checksums
from allstep.data.sources.label_index import index_with_labels, indexed_labels, labels_entry
from allstep.data.sources.labels import AS_NUMBERS, SORTED_ORDER, Labeling, StoredLabels, decide
from allstep.data.sources.open_file import File, Stamp, check_unchanged, open_file, stamp_of
from allstep.data.sources.shards import Numbering, Where, list_shards, read_classes
from allstep.data.sources.source import BadSample, Place, Sample, Source
from allstep.data.sources.tar.labels import LABELS, Members, label_of, recognize
from allstep.data.sources.tar.sample_groups import Groups
from allstep.data.sources.tar.scan import members
from allstep.data.sources.unpack import all_content, is_doubtful, open_content, packing
from allstep.errors import DataError

KIND = "tar"
IMAGES = tuple(suffix.removeprefix(".") for suffix in SUFFIXES)
# Reason for a bad sample of a packed shard whose compressed bytes are damaged.
_DOUBTFUL = (
    "the compressed bytes of its shard are damaged; it is unknown which of its samples are right"
)


def is_tar(name: str) -> bool:
    """Return whether a file has the name of a tar shard: x.tar, x.tar.gz or x.tgz."""
    return name.lower().endswith((".tar", ".tar.gz", ".tgz"))


class Shard:
    """One tar file and its index.

    `checksum` stores a CRC32C of each sample. With `keep`, checksums that were stored earlier are
    kept, even if the file was changed since.
    """

    def __init__(
        self, where: str, checksum: bool, progress: Progress | None, *, keep: bool = False
    ) -> None:
        self.where = where
        again = checksum and not keep

        def build() -> Index:
            before = None if again else stored_checksums(where, KIND)
            return _build(where, checksum, before, progress)

        self.index = indexed(
            where,
            KIND,
            lambda: stamp_of(where),
            build,
            needs=("crc",) if checksum else (),
            again=again,
            must_write=again,
        )
        self.lost: dict[int, str] = {int(row): reason for row, reason in self.index.extra["lost"]}
        self._extensions: list[str] = self.index.extra["extensions"]

    def __len__(self) -> int:
        return len(self.index["place"])

    @cached_property
    def file(self) -> File:
        """Return the file, unpacked if it is compressed; it is opened for the first sample."""
        return open_content(self.where, self.index.extra["packed"], self.index.stamp)

    def key(self, row: int) -> str:
        """Return the key of the sample `row`: its path without extension."""
        start, end = self.index["key"][row : row + 2].tolist()
        return self.index["keys"][start:end].tobytes().decode("utf-8", "surrogateescape")

    def members(self, row: int) -> dict[str, memoryview]:
        """Return the contents of the sample `row` by extension; ValueError if it is damaged."""
        if row in self.lost:
            raise ValueError(self.lost[row])
        first, last = self.index["first"][row : row + 2].tolist()
        columns = (self.index[name] for name in ("extension", "start", "size"))
        extensions, starts, sizes = (column[first:last].tolist() for column in columns)
        begin, end = starts[0], starts[-1] + sizes[-1]
        # Members of a sample are consecutive, so one range contains all of them.
        content = self.file.read(begin, end - begin)
        found = {
            self._extensions[extension]: content[start - begin : start - begin + size]
            for extension, start, size in zip(extensions, starts, sizes, strict=True)
        }
        if faults.active is not None:
            largest = max(found, key=lambda extension: len(found[extension]))
            damaged = faults.active.changed(found[largest])
            found[largest] = found[largest] if damaged is None else memoryview(damaged)
        self._check_crc(row, found)
        return found

    def _check_crc(self, row: int, found: Mapping[str, memoryview]) -> None:
        """Raise ValueError if the contents of a sample do not match the stored checksum."""
        if "crc" in self.index:
            crc, expected = _crc(found.values()), int(self.index["crc"][row])
            if crc != expected:
                raise ValueError(not_as_stored(crc, expected))

    def stored_labels(self, extension: str) -> StoredLabels:
        """Return the counts of the labels in the members with this `extension`.

        They are counted once, then stored in the index.
        """
        members = Members(self.index.columns, self._extensions, self.lost)
        self.index = index_with_labels(
            self.where,
            KIND,
            self.index,
            extension,
            True,
            lambda view: members.look(view, extension),
        )
        found = indexed_labels(self.index, extension, True)
        assert found is not None
        return found


class TarSource(Source):
    """The samples of tar shards at `where`: a folder, file, pattern, URL or list of these.

    - `data`, `target`: extensions of the data and the target of a sample (default: derived from the
      first samples). `target=""` means that samples have no label.
    - `num_classes`: a label outside 0..num_classes-1 is a BadSample (default: the number of class
      names, if known).
    - `classes`: class names in label order, if labels are names and there is no `classes.txt`.
    - `checksum`: store a CRC32C of each sample that has none yet; `again`: store new ones for all.
    - `labeling`: how labels are stored, as found by another process (default: read from the files).
    - `progress`: a function called with (name, done, total) while an index is built.
    """

    def __init__(
        self,
        where: Where,
        *,
        data: str | None = None,
        target: str | None = None,
        num_classes: int | None = None,
        classes: Sequence[str] = (),
        checksum: bool = False,
        again: bool = False,
        labeling: Labeling | None = None,
        progress: Progress | None = None,
    ) -> None:
        names = list_shards(where, is_tar, "tar files")
        self.shards = [Shard(name, checksum, progress, keep=not again) for name in names]
        self._numbers = Numbering(map(len, self.shards))
        listed, refusal = read_classes(self.shards[0].where)
        self._data = data
        self._target_in = self._recognize_target(listed) if target is None else target
        self.labeling = labeling or self._decide(listed, tuple(classes))
        if refusal and labeling is None and self.labeling.order == SORTED_ORDER:
            raise refusal
        self.classes = self.labeling.classes or listed
        self._num_classes = num_classes or len(self.classes) or None

    def __reduce__(self) -> tuple[Any, ...]:
        names = [shard.where for shard in self.shards]
        stamps = [shard.index.stamp for shard in self.shards]
        settings = {"data": self._data, "target": self._target_in, "num_classes": self._num_classes}
        return _reopen, (names, stamps, {**settings, "labeling": self.labeling})

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, number: int) -> Sample:
        which, row = self._numbers.locate(number)
        shard = self.shards[which]
        try:
            return self._sample(shard.members(row), shard.key(row))
        # json raises RecursionError for deeply nested brackets.
        except (ValueError, RecursionError) as error:
            raise BadSample(number, self.place(number), str(error)) from error

    def place(self, number: int) -> Place:
        which, row = self._numbers.locate(number)
        return Place(self.shards[which].where, int(self.shards[which].index["place"][row]))

    def close(self) -> None:
        for shard in self.shards:
            shard.__dict__.pop("file", None)

    def _sample(self, found: dict[str, memoryview], key: str) -> Sample:
        """Return the sample with these contents; ValueError if it lacks its data or target."""
        accepted = (self._data,) if self._data else IMAGES
        image = next((name for name in found if name in accepted), None)
        if image is None:
            raise ValueError(
                f"sample {key!r} has no {self._data or 'image'}, only {', '.join(found)}"
            )
        fields = {
            name: _field(name, content)
            for name, content in found.items()
            if name not in (image, self._target_in)
        }
        target = 0 if self._target_in == "" else self._target_of(found, key)
        return Sample(found[image], target, fields | {"__key__": key})

    def _target_of(self, found: dict[str, memoryview], key: str) -> Any:
        """Return the target of a sample; ValueError if it has none, or its label is wrong."""
        if self._target_in is None:
            raise ValueError(
                f"no member is known as its label, it has only {', '.join(found)}; give its"
                " extension: target=..."
            )
        if self._target_in not in found:
            raise ValueError(f"sample {key!r} has no {self._target_in}, only {', '.join(found)}")
        stored = label_of(self._target_in, bytes(found[self._target_in]))
        target = self.labeling.value(stored) if self._target_in in LABELS else stored
        if isinstance(target, int) and self._num_classes and not 0 <= target < self._num_classes:
            raise ValueError(f"its label is {target}, expected 0 to {self._num_classes - 1}")
        return target

    def _decide(self, listed: tuple[str, ...], given: tuple[str, ...]) -> Labeling:
        """Return how labels are stored and numbered, from the counts of all shards."""
        if self._target_in is None or self._target_in not in LABELS:
            return AS_NUMBERS
        return decide(
            self._target_in,
            [shard.stored_labels(self._target_in) for shard in self.shards],
            listed,
            given,
        )

    def _recognize_target(self, listed: tuple[str, ...]) -> str | None:
        """Return the extension of the label, from the first hundred samples.

        None if all of them are bad. Raise DataError if none of the good ones has a known label.
        """
        seen: set[str] = set()
        for number in range(min(len(self), 100)):
            which, row = self._numbers.locate(number)
            try:
                found = self.shards[which].members(row)
            except ValueError:
                continue
            if extension := recognize(found, listed):
                return extension
            seen.update(found)
        if seen:
            known = (
                "cls, an integer in txt or json, a name in json, or in txt one that classes.txt"
                " lists"
            )
            raise DataError(
                f"{self.shards[0].where}: no label ({known}) in its first samples, which have"
                f' {", ".join(sorted(seen))}; give its extension: TarSource(..., target="..."), or'
                ' target="" for samples without one'
            )
        return None


def _field(extension: str, content: memoryview) -> Any:
    if extension == "json":
        return json.loads(bytes(content))
    return bytes(content).decode() if extension == "txt" else bytes(content)


def _crc(contents: Iterable[memoryview]) -> int:
    """Return the CRC32C of all contents, concatenated."""
    return reduce(crc32c_on, contents, 0)


def _reopen(names: list[str], stamps: list[Stamp], settings: Mapping[str, Any]) -> TarSource:
    """Open the shards of a pickled source; raise DataError if one was changed since."""
    source = TarSource(names, **settings)
    check_unchanged(names, stamps, [shard.index.stamp for shard in source.shards])
    return source


def _build(where: str, checksum: bool, before: Index | None, progress: Progress | None) -> Index:
    """Scan a shard and return its index; `before` is an earlier one with checksums to keep."""
    file = open_file(where)
    packed = packing(file.read(0, 2)) == "gzip"
    with all_content(file, packed) as view:
        size = len(view)
        groups = Groups()
        for count, found in enumerate(members(view)):
            groups.add(found)
            if progress and count % 4096 == 0:
                progress(where, found.header, size)
        columns, extra = groups.finish()
        if checksum or before:
            columns["crc"] = np.array(
                [_crc(view[a : a + n] for a, n in spans) for spans in groups.spans()], np.uint32
            )
        if before:
            _keep_checksums(before, columns)
        if is_doubtful(view):
            extra["lost"] = [(row, _DOUBTFUL) for row in range(len(columns["place"]))]
        labels = _look_at_labels(Members(columns, extra["extensions"], dict(extra["lost"])), view)
    if progress:
        progress(where, size, size)
    return Index(columns, {"packed": packed, **extra, **labels}, file.stamp)


def _look_at_labels(members: Members, view: memoryview) -> dict[str, Any]:
    """Return the index's entry on labels; {} if it is not known which members are labels."""
    extension = members.recognize(view)
    return labels_entry(extension, *members.look(view, extension)) if extension else {}


def _keep_checksums(before: Index, columns: dict[str, NDArray[Any]]) -> None:
    """Replace checksums in `columns` by those that an earlier index has for the same samples.

    A sample is identified by its key, and by its position among the samples with that key.
    """
    stored = dict(zip(_names(before), before["crc"].tolist(), strict=True))
    columns["crc"] = np.array(
        [
            stored.get(name, now)
            for name, now in zip(_names(columns), columns["crc"].tolist(), strict=True)
        ],
        np.uint32,
    )


def _names(columns: Index | dict[str, NDArray[Any]]) -> Iterator[tuple[bytes, int]]:
    """Yield, for each sample, its key and the number of earlier samples with that key."""
    keys, ends, seen = columns["keys"].tobytes(), columns["key"].tolist(), Counter[bytes]()
    for start, end in pairwise(ends):
        key = keys[start:end]
        yield key, seen[key]
        seen[key] += 1
