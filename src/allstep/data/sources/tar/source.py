"""Tar shards with WebDataset's naming: any sample of any shard, at once.

```
00012.jpg  00012.cls  00012.json | 00013.jpg  00013.cls ...       members of one sample follow each other; key: the path up to the
|------- sample 00012 --------|                                    first dot of the file's name; extension: what comes after it
```

An image's extension (jpg, jpeg, png, webp, ppm, ...) is the data; `cls`, else a number in `txt` or
`json` ("label" or "class" of an object), else a class name in them (`labels`), is the target;
everything else, and the key as `__key__`, goes to `fields` by extension. The index holds each
member's place, so a read touches only the members of its sample. GNU's and POSIX's (pax) long names
are understood.

A tar has no checksum of its contents, only of its headers. A shard that is cut, or has a damaged
header, gives all samples up to there; the rest of it is one BadSample. So is every sample of a
packed shard (`x.tar.gz`) whose compressed bytes are damaged: nothing tells which are right.
`checksum=True` stores a CRC32C per sample in the index, and every read is held against it, also
after the shard was changed; `again=True` stores new ones. Samples without a label: `target=""` says
that they have none (their target is 0).
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.checksum import crc32c_on
from allstep.data.sources.files import File, Stamp, check_unchanged, open_file, stamp_of
from allstep.data.sources.folder import IMAGES as SUFFIXES
from allstep.data.sources.index import Index, Progress, indexed, not_as_stored, stored_checksums
from allstep.data.sources.label_index import index_with_labels, indexed_labels, labels_entry
from allstep.data.sources.labels import AS_NUMBERS, Labeling, StoredLabels, decide
from allstep.data.sources.shards import Numbering, Where, list_shards, read_classes
from allstep.data.sources.source import BadSample, Place, Sample, Source
from allstep.data.sources.tar.groups import Groups
from allstep.data.sources.tar.labels import LABELS, Members, label_of, recognise
from allstep.data.sources.tar.scan import members
from allstep.data.sources.unpack import all_content, is_doubtful, open_content, packing
from allstep.errors import DataError

KIND = "tar"
IMAGES = tuple(suffix.removeprefix(".") for suffix in SUFFIXES)
_DOUBTFUL = (
    "the compressed bytes of its shard are damaged, and nothing tells which samples in it are right"
)


def is_tar(name: str) -> bool:
    """Whether a file is called as tar shards are."""
    return name.lower().endswith((".tar", ".tar.gz", ".tgz"))


class Shard:
    """One tar file, and its index.

    `keep`: checksums that were stored before are kept, whatever happened to the file since.
    """

    def __init__(
        self, where: str, checksum: bool, progress: Progress | None, *, keep: bool = False
    ) -> None:
        self.where = where
        again = checksum and not keep
        self.index = indexed(
            where,
            KIND,
            lambda: stamp_of(where),
            lambda: _build(
                where, checksum, None if again else stored_checksums(where, KIND), progress
            ),
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
        return open_content(self.where, self.index.extra["packed"], self.index.stamp)

    def key(self, row: int) -> str:
        start, end = self.index["key"][row : row + 2].tolist()
        return self.index["keys"][start:end].tobytes().decode("utf-8", "surrogateescape")

    def members(self, row: int) -> dict[str, memoryview]:
        """The contents of a sample by extension; ValueError when they are damaged."""
        if row in self.lost:
            raise ValueError(self.lost[row])
        first, last = self.index["first"][row : row + 2].tolist()
        extensions, starts, sizes = (
            self.index[name][first:last].tolist() for name in ("extension", "start", "size")
        )
        begin, end = starts[0], starts[-1] + sizes[-1]
        content = self.file.read(
            begin, end - begin
        )  # members of a sample are neighbours: one range
        found = {
            self._extensions[extension]: content[start - begin : start - begin + size]
            for extension, start, size in zip(extensions, starts, sizes, strict=True)
        }
        if "crc" in self.index and (crc := _crc(found.values())) != (
            expected := int(self.index["crc"][row])
        ):
            raise ValueError(not_as_stored(crc, expected))
        return found

    def stored_labels(self, extension: str) -> StoredLabels:
        """What its samples store as labels in the members with this `extension`; counted once, then
        kept in the index."""
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
    """The samples of tar shards: a folder, file, pattern, URL or list of them.

    `data` and `target` name the extensions of the sample's data and target; without them, the first
    sample tells. `classes` numbers labels that are names where there is no `classes.txt`;
    `labeling` is what another process found. `checksum` stores checksums where there are none yet,
    `again` in any case.
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
        listed = read_classes(self.shards[0].where)
        self._data = data
        self._target_in = self._recognise_target(listed) if target is None else target
        self.labeling = labeling or self._decide(listed, tuple(classes))
        self.classes = self.labeling.classes or listed
        self._num_classes = num_classes or len(self.classes) or None

    def __reduce__(self) -> tuple[Any, ...]:
        names, stamps = (
            [shard.where for shard in self.shards],
            [shard.index.stamp for shard in self.shards],
        )
        settings = {"data": self._data, "target": self._target_in, "num_classes": self._num_classes}
        return _reopen, (names, stamps, {**settings, "labeling": self.labeling})

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, number: int) -> Sample:
        which, row = self._numbers.locate(number)
        shard = self.shards[which]
        try:
            return self._sample(shard.members(row), shard.key(row))
        except (
            ValueError,
            RecursionError,
        ) as error:  # the latter: what json says of brackets without end
            raise BadSample(number, self.place(number), str(error)) from error

    def place(self, number: int) -> Place:
        which, row = self._numbers.locate(number)
        return Place(self.shards[which].where, int(self.shards[which].index["place"][row]))

    def close(self) -> None:
        for shard in self.shards:
            shard.__dict__.pop("file", None)

    def _sample(self, found: dict[str, memoryview], key: str) -> Sample:
        image = next(
            (name for name in found if (name == self._data if self._data else name in IMAGES)),
            None,
        )
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
        if self._target_in is None:
            raise ValueError(
                f"nothing is known as its label, it has only {', '.join(found)}; name it:"
                " target=..."
            )
        if self._target_in not in found:
            raise ValueError(f"sample {key!r} has no {self._target_in}, only {', '.join(found)}")
        stored = label_of(self._target_in, bytes(found[self._target_in]))
        target = self.labeling.value(stored) if self._target_in in LABELS else stored
        if isinstance(target, int) and self._num_classes and not 0 <= target < self._num_classes:
            raise ValueError(f"its label is {target}, expected 0 to {self._num_classes - 1}")
        return target

    def _decide(self, listed: tuple[str, ...], given: tuple[str, ...]) -> Labeling:
        """How labels are stored."""
        if self._target_in is None or self._target_in not in LABELS:
            return AS_NUMBERS
        return decide(
            self._target_in,
            [shard.stored_labels(self._target_in) for shard in self.shards],
            listed,
            given,
        )

    def _recognise_target(self, listed: tuple[str, ...]) -> str | None:
        """The extension that holds the class, in the first of the first hundred samples that has
        one. None: all of them are bad."""
        seen: set[str] = set()
        for number in range(min(len(self), 100)):
            which, row = self._numbers.locate(number)
            try:
                found = self.shards[which].members(row)
            except ValueError:
                continue
            if extension := recognise(found, listed):
                return extension
            seen.update(found)
        if seen:
            known = (
                "cls, an integer in txt or json, a name in json, or in txt one that classes.txt"
                " lists"
            )
            raise DataError(
                f"{self.shards[0].where}: no label ({known}) in its first samples, which have"
                f' {", ".join(sorted(seen))}; name it: TarSource(..., target="..."), or'
                ' target="" for samples without one'
            )
        return None


def _field(extension: str, content: memoryview) -> Any:
    if extension == "json":
        return json.loads(bytes(content))
    return bytes(content).decode() if extension == "txt" else bytes(content)


def _crc(contents: Iterable[memoryview]) -> int:
    """The CRC32C of all contents, one behind the other."""
    return reduce(crc32c_on, contents, 0)


def _reopen(names: list[str], stamps: list[Stamp], settings: Mapping[str, Any]) -> TarSource:
    source = TarSource(names, **settings)
    check_unchanged(names, stamps, [shard.index.stamp for shard in source.shards])
    return source


def _build(where: str, checksum: bool, before: Index | None, progress: Progress | None) -> Index:
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
    """What the index keeps of the labels; nothing where it is not known which members they are."""
    extension = members.recognise(view)
    return labels_entry(extension, *members.look(view, extension)) if extension else {}


def _keep_checksums(before: Index, columns: dict[str, NDArray[Any]]) -> None:
    """Gives each sample the checksum that was stored for it `before`, if one was: by its key, the
    nth of that key."""
    stored = dict(zip(_names(before), before["crc"].tolist(), strict=True))
    columns["crc"] = np.array(
        [
            stored.get(name, now)
            for name, now in zip(_names(columns), columns["crc"].tolist(), strict=True)
        ],
        np.uint32,
    )


def _names(columns: Index | dict[str, NDArray[Any]]) -> Iterator[tuple[bytes, int]]:
    keys, ends, seen = columns["keys"].tobytes(), columns["key"].tolist(), Counter[bytes]()
    for start, end in pairwise(ends):
        key = keys[start:end]
        yield key, seen[key]
        seen[key] += 1
