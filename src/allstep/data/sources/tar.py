"""Tar shards with WebDataset's naming: any sample of any shard, at once.

```
00012.jpg  00012.cls  00012.json | 00013.jpg  00013.cls ...       members of one sample follow each other; key: the path up to the
|------- sample 00012 --------|                                    first dot of the file's name; extension: what comes after it
```

A picture's extension (jpg, jpeg, png, webp, ppm, ...) is the data; `cls`, else a number in `txt` or `json` ("label" or "class" of an
object), is the target; everything else, and the key as `__key__`, goes to `fields` by extension. The index holds each member's place, so
a read touches only the members of its sample. GNU's and POSIX's (pax) long names are understood.

A tar has no checksum of its contents, only of its headers. A shard that is cut, or has a damaged header, gives all samples up to there; the
rest of it is one BadSample. `checksum=True` stores a CRC32C per sample in the index, and every read is held against it.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from allstep.data.sources.checksum import crc32c
from allstep.data.sources.files import File, open_file, stamp_of
from allstep.data.sources.index import Index, Progress, indexed
from allstep.data.sources.shards import Numbering, Where, list_shards, read_classes
from allstep.data.sources.source import BadSample, Place, Sample, Source
from allstep.data.sources.targroups import Groups
from allstep.data.sources.tarwalk import members
from allstep.data.sources.unpack import all_content, open_content, packing

KIND = "tar"
PICTURES = ("jpg", "jpeg", "png", "webp", "ppm", "pgm", "pbm", "bmp", "gif", "tif", "tiff")
_TARGETS = ("cls", "txt", "json")


def is_tar(name: str) -> bool:
    """Whether a file is called as tar shards are."""
    return name.endswith((".tar", ".tar.gz", ".tgz"))


class Shard:
    """One tar file, and its index."""

    def __init__(self, where: str, checksum: bool, progress: Progress | None) -> None:
        self.where = where
        needs = ("crc",) if checksum else ()
        self.index = indexed(
            where, KIND, lambda: stamp_of(where), lambda: _build(where, checksum, progress), needs=needs
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
        extensions, starts, sizes = (self.index[name][first:last].tolist() for name in ("extension", "start", "size"))
        begin, end = starts[0], starts[-1] + sizes[-1]
        content = self.file.read(begin, end - begin)  # members of a sample are neighbours: one range
        found = {
            self._extensions[extension]: content[start - begin : start - begin + size]
            for extension, start, size in zip(extensions, starts, sizes, strict=True)
        }
        if "crc" in self.index and (crc := _crc(found.values())) != (expected := int(self.index["crc"][row])):
            raise ValueError(f"its CRC32C is {crc:#010x}, the index says {expected:#010x}: the bytes are damaged")
        return found


class TarSource(Source):
    """The samples of tar shards: a folder, file, pattern, URL or list of them.

    `data` and `target` name the extensions of the sample's data and target; without them, the first sample tells.
    """

    def __init__(
        self,
        where: Where,
        *,
        data: str | None = None,
        target: str | None = None,
        num_classes: int | None = None,
        checksum: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.shards = [Shard(name, checksum, progress) for name in list_shards(where, is_tar, "tar files")]
        self._numbers = Numbering(map(len, self.shards))
        self.classes = read_classes(self.shards[0].where)
        self._num_classes = num_classes or len(self.classes) or None
        self._data = data
        self._target_in = target or self._recognise_target()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, ([shard.where for shard in self.shards], self._data, self._target_in, self._num_classes)

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, number: int) -> Sample:
        which, row = self._numbers.locate(number)
        shard = self.shards[which]
        try:
            return self._sample(shard.members(row), shard.key(row))
        except (ValueError, RecursionError) as error:  # the latter: what json says of brackets without end
            raise BadSample(number, self.place(number), str(error)) from error

    def place(self, number: int) -> Place:
        which, row = self._numbers.locate(number)
        return Place(self.shards[which].where, int(self.shards[which].index["place"][row]))

    def close(self) -> None:
        for shard in self.shards:
            shard.__dict__.pop("file", None)

    def _sample(self, found: dict[str, memoryview], key: str) -> Sample:
        picture = next((name for name in found if (name == self._data if self._data else name in PICTURES)), None)
        if picture is None:
            raise ValueError(f"sample {key!r} has no {self._data or 'picture'}, only {', '.join(found)}")
        fields = {
            name: _field(name, content) for name, content in found.items() if name not in (picture, self._target_in)
        }
        target = self._target_of(found, key) if self._target_in else 0
        return Sample(found[picture], target, fields | {"__key__": key})

    def _target_of(self, found: dict[str, memoryview], key: str) -> Any:
        if self._target_in not in found:
            raise ValueError(f"sample {key!r} has no {self._target_in}, only {', '.join(found)}")
        target = _target(self._target_in, bytes(found[self._target_in]))
        if isinstance(target, int) and self._num_classes and not 0 <= target < self._num_classes:
            raise ValueError(f"its label is {target}, expected 0 to {self._num_classes - 1}")
        return target

    def _recognise_target(self) -> str | None:
        """The extension that holds a class number, in the first of the first hundred samples that has one."""
        for number in range(min(len(self), 100)):
            which, row = self._numbers.locate(number)
            try:
                found = self.shards[which].members(row)
            except ValueError:
                continue
            if names := [name for name in _TARGETS if name in found and _is_class(name, found[name])]:
                return names[0]
        return None


def _target(extension: str, content: bytes) -> Any:
    """The target that is written in `content`; ValueError where it is none."""
    if extension in ("cls", "txt"):
        return int(content)
    if extension != "json":
        return content
    value = json.loads(content)
    if not isinstance(value, dict):
        return value
    if not (names := [name for name in ("label", "class") if name in value]):
        raise ValueError(f"its json has neither 'label' nor 'class', only {', '.join(value)}")
    return value[names[0]]


def _is_class(extension: str, content: memoryview) -> bool:
    try:
        return isinstance(_target(extension, bytes(content)), int)
    except (ValueError, RecursionError):
        return extension == "cls"  # which is nothing else: then this one is damaged


def _field(extension: str, content: memoryview) -> Any:
    if extension == "json":
        return json.loads(bytes(content))
    return bytes(content).decode() if extension == "txt" else bytes(content)


def _crc(contents: Iterable[memoryview]) -> int:
    return crc32c(b"".join(contents))


def _reopen(names: list[str], data: str | None, target: str | None, num_classes: int | None) -> TarSource:
    return TarSource(names, data=data, target=target, num_classes=num_classes)


def _build(where: str, checksum: bool, progress: Progress | None) -> Index:
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
        if checksum:
            columns["crc"] = np.array([_crc(view[a : a + n] for a, n in spans) for spans in groups.spans()], np.uint32)
    if progress:
        progress(where, size, size)
    return Index(columns, {"packed": packed, **extra}, file.stamp)
