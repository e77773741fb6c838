"""Indexes: the offsets of all samples of a shard in a small file, so that it is scanned only once.

```
8 bytes    b"allstepI"
4 bytes    length of the description, little-endian
4 bytes    CRC32C of all bytes that follow
           the description, JSON: format, kind, stamp, columns (name -> type, offset, count), extra
           (further values that the kind of source needs)
           the columns, each aligned to 64 bytes: arrays with one number per sample, or per damaged
           sample, or names
```

An index is stored next to its shard (`.x.tfrecord.allstep-index`), or in the cache folder if the
shard is remote or its folder is not writable. It is mapped, not loaded: a TFRecord sample takes 12
bytes of it, which all processes of a host share. It is valid if it is complete (CRC), of the right
kind, and built for the current version of the file (stamp: size and modification time). An invalid
index is ignored, and the shard is scanned again. Checksums (column `crc`, stored on request) remain
in use after the file has changed: its samples are compared with them, until new ones are requested.
A new index appears complete, by a rename. A lock (`files.lock`) makes processes that open the same
shard build its index one at a time. If no index can be written (full disk, read-only cache), it
stays in memory.

Format 2 contains, for TFRecord and tar files, how labels are stored (`extra["labels"]`, see
`labels`). An index of format 1 is read too: opening the source then reads the labels and writes the
index again.
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
# The previous format, which lacks only the information on labels.
_READABLE = 1
_MAGIC = b"allstepI"
_HEAD = struct.Struct("<8sII")
_ALIGN = 64
_CHUNK = 1 << 20

Progress = Callable[[str, int, int], None]
"""Called while an index is built: name of the file, amount done, total amount.

The unit is bytes; for class folders it is classes, then files."""


@dataclass(frozen=True)
class Index:
    """The index of one shard or folder."""

    columns: Mapping[str, NDArray[Any]]
    """Arrays by name, such as "offset" and "length"."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further values that the kind of source needs; JSON can hold them."""
    stamp: Stamp = field(default_factory=dict)
    """The version of the file that the index was built for."""

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
    """Return the stored index of `where` if it is valid and has the columns `needs`, else build it.

    - `kind`: the kind of source, such as "tfrecord".
    - `stamp`: returns the current stamp of the file.
    - `build`: builds the index. Its stamp must be read before the content, so that a later opening
      detects a change in the meantime.
    - `again`: build the index even if a valid one is stored.
    - `must_write`: raise DataError if the new index cannot be written.
    """
    places = index_places(where)
    if not again and (found := find_index(places, kind, stamp(), needs)):
        return found
    with in_turn(lockable(where)):
        # Another process may have built it while this one waited for the lock.
        if not again and (found := find_index(places, kind, stamp(), needs)):
            return found
        made = build()
    if place := write_somewhere(where, kind, made, must_write):
        # Read it back mapped, so that processes share its memory.
        return find_index((place,), kind, made.stamp, needs) or made
    return made


def index_places(where: str | Path) -> tuple[Path, ...]:
    """Return the paths that the index of `where` may have, the preferred one first."""
    key = str(where) if is_remote(where) else str(local_path(where).absolute())
    # A path may be bytes that are not UTF-8.
    name = blake2b(os.fsencode(key), digest_size=16).hexdigest()
    in_cache = cache_folder() / "index" / f"{name}.allstep-index"
    if is_remote(where):
        return (in_cache,)
    path = local_path(where)
    next_to_shard = path.with_name(f".{path.name}.allstep-index")
    return (path / ".allstep-index" if path.is_dir() else next_to_shard, in_cache)


def find_index(
    places: tuple[Path, ...], kind: str, stamp: Stamp, needs: tuple[str, ...] = ()
) -> Index | None:
    """Return the first valid index in `places` that has the columns `needs`."""
    for place in places:
        found = read_index(place, kind, stamp)
        if found and all(name in found for name in needs):
            return found
    return None


def read_index(place: Path, kind: str, stamp: Stamp | None = None) -> Index | None:
    """Return the index in the file `place`, mapped.

    None if there is none, or it is damaged, of another kind, or not built for `stamp` (None: any).
    """
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
    """Return the index of `where` that has checksums, even if `where` was changed since.

    The checksums describe the content that the user confirmed; a changed file must still match it.
    """
    found = (read_index(place, kind) for place in index_places(where))
    return next((index for index in found if index and "crc" in index), None)


def not_as_stored(found: int, stored: int) -> str:
    """Return the reason for a bad sample whose checksum differs from the stored one."""
    remedy = "if the change is intended, `allstep data index --checksum` stores new ones"
    return (
        f"its CRC32C is {found:#010x}, expected {stored:#010x} as in the index: damaged or changed"
        f" since checksums were stored; {remedy}"
    )


def write_somewhere(where: str | Path, kind: str, index: Index, must: bool = False) -> Path | None:
    """Write the index of `where` to the first place that is writable; return that place.

    Return None if there is none; raise DataError instead if it `must` be written.
    """
    places = index_places(where)
    for place in places:
        if write_index(place, kind, index):
            return place
    if must:
        tried = " nor ".join(map(str, places))
        raise DataError(
            f"{where}: its index cannot be written, neither {tried}; set ALLSTEP_CACHE to a folder"
            " that is writable"
        )
    return None


def write_index(place: Path, kind: str, index: Index) -> bool:
    """Write `index` to the file `place`, completely or not at all; return False on failure."""
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
    """Return whether the CRC of an index file is right.

    It is read, not mapped: pages that were only checked should not count as the process's memory.
    """
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
    """Write everything after the header; return the length of the description, and the CRC."""
    columns = {name: np.ascontiguousarray(column) for name, column in index.columns.items()}
    about = _describe(kind, index, columns)
    crc, position = google_crc32c.value(about), _HEAD.size + len(about)
    file.write(about)
    for column in columns.values():
        content = column.view(np.uint8).data if column.size else b""
        for part in (bytes(-position % _ALIGN), content):
            for start in range(0, len(part), _CHUNK):
                chunk = bytes(part[start : start + _CHUNK])
                crc = google_crc32c.extend(crc, chunk)
                file.write(chunk)
            position += len(part)
    return len(about), crc


def _describe(kind: str, index: Index, columns: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the description of an index, padded to a length known in advance.

    It contains the offsets of the columns, which depend on its own length. Room for the largest
    possible offsets resolves that.
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
