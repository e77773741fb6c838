"""Indexes: what a walk through a shard found, kept in a small file so that nobody walks twice.

```
8 bytes    b"allstepI"
4 bytes    length of the description, little-endian
4 bytes    CRC32C of all that follows
           the description, JSON: format, kind, stamp, columns (name -> type, place, count), extra
           (whatever the kind needs) the columns, each beginning at a multiple of 64 bytes: arrays
           of one number per sample, or per damaged sample, or names
```

An index is beside its shard (`.x.tfrecord.allstep-index`), or in the cache folder when the shard is
remote or its folder cannot be written. It is mapped, not loaded: a TFRecord sample takes 12 bytes
of it, which all processes of a host share. It is used when it is whole (CRC), of the right kind,
and made for the file as it is now (stamp: size and time of change); anything else is as good as no
index, and the shard is walked again. Checksums (`crc`, where somebody asked for them) outlive that:
they are what a changed file is held against, until new ones are asked for. A new index appears
whole, by a rename. Processes that open the same shard at once take turns (`files.lock`). Where no
index can be written, full disk or read-only cache, it stays in memory.

Format 2 has, for TFRecords and tars, what labels are stored as (`extra["labels"]`, see `labels`).
An index of format 1 is read as well; the labels are then looked at when the source is opened, and
the index is written again.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from allstep.data.cache import cache_folder
from allstep.data.sources.files import Stamp, is_remote, local_path, lockable
from allstep.data.sources.mapping import map_file
from allstep.errors import DataError
from allstep.files.atomic import write_atomic
from allstep.files.bounded import open_regular
from allstep.files.lock import in_turn

FORMAT = 2
_READABLE = 1  # the format before this one: the same, but without what labels are stored as
_MAGIC = b"allstepI"
_HEAD = struct.Struct("<8sII")
_ALIGN = 64
_CHUNK = 1 << 20

Progress = Callable[[str, int, int], None]
"""Told, as an index is built: the file's name, how much is done, of how much (bytes; files for a
folder)."""


@dataclass(frozen=True)
class Index:
    """Columns by name, what else the kind of source must know, and what the index was made for."""

    columns: Mapping[str, NDArray[Any]]
    extra: Mapping[str, Any] = field(default_factory=dict)
    stamp: Stamp = field(default_factory=dict)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns


def indexed(
    where: str | Path,
    kind: str,
    stamp: Callable[[], Stamp],
    build: Callable[[], Index],
    *,
    needs: tuple[str, ...] = (),
    again: bool = False,
    must_write: bool = False,
) -> Index:
    """The index of `where`: the one that is kept, if it is right and has the columns `needs`, else
    what `build` makes of it.

    `build` must fill in the stamp, taken before it looked: then a change in the meantime shows.
    `again`: build in any case. `must_write`: an index that can only stay in memory will not do.
    """
    places = index_places(where)
    if not again and (kept := find_index(places, kind, stamp(), needs)):
        return kept
    with in_turn(lockable(where)):
        if not again and (
            kept := find_index(places, kind, stamp(), needs)
        ):  # another process made it while we waited
            return kept
        made = build()
    if place := write_somewhere(where, kind, made, must_write):
        return (
            find_index((place,), kind, made.stamp, needs) or made
        )  # mapped, so that processes share it
    return made


def index_places(where: str | Path) -> tuple[Path, ...]:
    """Where the index of `where` may be, the best place first."""
    key = str(where) if is_remote(where) else str(local_path(where).absolute())
    # A path may be bytes that are not UTF-8.
    name = blake2b(os.fsencode(key), digest_size=16).hexdigest()
    in_cache = cache_folder() / "index" / f"{name}.allstep-index"
    if is_remote(where):
        return (in_cache,)
    path = local_path(where)
    beside = (
        path / ".allstep-index" if path.is_dir() else path.with_name(f".{path.name}.allstep-index")
    )
    return (beside, in_cache)


def find_index(
    places: tuple[Path, ...], kind: str, stamp: Stamp, needs: tuple[str, ...] = ()
) -> Index | None:
    """The first index in `places` that is right."""
    for place in places:
        found = read_index(place, kind, stamp)
        if found and all(name in found for name in needs):
            return found
    return None


def read_index(place: Path, kind: str, stamp: Stamp | None = None) -> Index | None:
    """The index in the file `place`, mapped; None when there is none, or it is damaged, foreign or
    not made for `stamp`."""
    try:
        with open_regular(place) as file:
            if not _is_whole(file):
                return None
        view, _ = map_file(place)
        about = json.loads(bytes(view[_HEAD.size : _HEAD.size + _HEAD.unpack_from(view)[1]]))
        if (
            about["format"] not in (_READABLE, FORMAT)
            or about["kind"] != kind
            or stamp not in (None, about["stamp"])
        ):
            return None
        columns = {name: _column(view, *column) for name, column in about["columns"].items()}
        return Index(columns, about["extra"], about["stamp"])
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        *(struct.error, IndexError, OverflowError, RecursionError),
    ):
        return None


def stored_checksums(where: str | Path, kind: str) -> Index | None:
    """The index of `where` that holds checksums, also when `where` was changed since: what they
    were stored for must still be true."""
    found = (read_index(place, kind) for place in index_places(where))
    return next((index for index in found if index and "crc" in index), None)


def not_as_stored(found: int, stored: int) -> str:
    """What is said of a sample whose checksum is another than the one that was stored."""
    remedy = "if the change was wanted, `allstep data index --checksum` stores new ones"
    return (
        f"its CRC32C is {found:#010x}, the index says {stored:#010x}: damaged or changed since"
        f" checksums were stored; {remedy}"
    )


def write_somewhere(where: str | Path, kind: str, index: Index, must: bool = False) -> Path | None:
    """Writes the index of `where` to the best place that can be written.

    None where there is none; an error if it `must` be written.
    """
    places = index_places(where)
    for place in places:
        if write_index(place, kind, index):
            return place
    if must:
        tried = " nor ".join(map(str, places))
        raise DataError(
            f"{where}: its index cannot be written, neither {tried}; ALLSTEP_CACHE names another"
            " folder"
        )
    return None


def write_index(place: Path, kind: str, index: Index) -> bool:
    """Writes `index` to the file `place`, whole or not at all; False where that is not possible."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with write_atomic(place) as file:
            file.write(_HEAD.pack(_MAGIC, 0, 0))
            length, crc = _write_body(file, kind, index)
            file.seek(0)
            file.write(_HEAD.pack(_MAGIC, length, crc))
        return True
    except OSError:
        return False


def _is_whole(file: Any) -> bool:
    """Reads instead of mapping: memory that was only checked should not count as the process's own."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        return False
    crc = 0
    while chunk := file.read(_CHUNK):
        crc = google_crc32c.extend(crc, chunk)
    return bool(crc == _HEAD.unpack(head)[2])


def _column(view: memoryview, dtype: str, start: int, count: int) -> NDArray[Any]:
    return np.frombuffer(view, dtype, count, start) if count else np.empty(0, dtype)


def _write_body(file: Any, kind: str, index: Index) -> tuple[int, int]:
    """Writes all but the head; gives back what the head must say: the description's length and the
    CRC."""
    columns = {name: np.ascontiguousarray(column) for name, column in index.columns.items()}
    about = _describe(kind, index, columns)
    crc, position = google_crc32c.value(about), _HEAD.size + len(about)
    file.write(about)
    for column in columns.values():
        for piece in (
            bytes(-position % _ALIGN),
            column.view(np.uint8).data if column.size else b"",
        ):
            for start in range(0, len(piece), _CHUNK):
                chunk = bytes(piece[start : start + _CHUNK])
                crc = google_crc32c.extend(crc, chunk)
                file.write(chunk)
            position += len(piece)
    return len(about), crc


def _describe(kind: str, index: Index, columns: Mapping[str, NDArray[Any]]) -> bytes:
    """The description.

    Where columns begin depends on its length: that is settled by leaving room for the largest
    places.
    """
    about: dict[str, Any] = {
        "format": FORMAT,
        "kind": kind,
        "stamp": dict(index.stamp),
        "extra": dict(index.extra),
    }
    room = len(json.dumps(about)) + sum(len(name) + 80 for name in columns) + _ALIGN
    start = _HEAD.size + room
    about["columns"] = {}
    for name, column in columns.items():
        start += -start % _ALIGN
        about["columns"][name] = [column.dtype.str, start, len(column)]
        start += column.nbytes
    return json.dumps(about).encode().ljust(room)
