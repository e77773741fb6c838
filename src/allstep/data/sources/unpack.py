"""Files that are compressed as a whole (`x.tfrecord.gz`, `x.tar.gz`) cannot be read at any place.
They are unpacked once, into the cache.

```
ALLSTEP_CACHE/unpacked/<key>-<bytes>-<time>-<name>    key: a hash of the path or URL and its stamp, so a changed file is unpacked again
```

The unpacked file appears by a rename, whole. Its name holds its length and its time of change, so
one that was cut or changed since (a full disk, a cleaner of caches) is unpacked again: an index
that was made of it would lose samples. Of a packed file that is cut or damaged, all that came out
before the damage is kept, and a mark is put behind it that is neither a record nor a member of a
tar: its reader finds damage there, today and next time, instead of an end. There are two marks: of
a file that was cut, what comes before is sound; where bytes or a checksum are wrong, nothing tells
which of the bytes before are. Records have checksums of their own; a tar has none, and must take
all of its samples for bad (`is_doubtful`). What kind of compression it is, the first bytes tell:
gzip, or zlib as TensorFlow writes it.

**Room.** A few megabytes can unpack to a thousand times as much. The free space of the disk is
checked before and while a file is written here; 1 GB of it, or 5% of a small disk, stays free.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from hashlib import blake2b
from pathlib import Path

from allstep.console.escape import print_notice
from allstep.console.quantities import nbytes
from allstep.data.cache import cache_folder
from allstep.data.sources.files import File, LocalFile, Stamp, lockable, open_file
from allstep.errors import DataError
from allstep.files.atomic import new_part, remove_leftovers
from allstep.files.lock import in_turn

CUT = b"allstep: the packed file is cut off here\n"
DAMAGED = b"allstep: the packed file is damaged before or here\n"
_EITHER = 47  # zlib's word for: gzip or zlib, look at the first bytes
_CHUNK = 1 << 16
_PIECE = 1 << 22
_KEPT_FREE, _PART_KEPT_FREE = 1 << 30, 20  # bytes, but at most this part of the disk

Note = Callable[[str], None]


def packing(head: bytes | memoryview) -> str | None:
    """What the first bytes of a file may be the beginning of: "gzip", "zlib" or None.

    A guess for zlib: it has no magic number.
    """
    if bytes(head[:2]) == b"\x1f\x8b":
        return "gzip"
    looks_like_zlib = len(head) > 1 and head[0] & 0x8F == 8 and (head[0] << 8 | head[1]) % 31 == 0
    return "zlib" if looks_like_zlib else None


def unpacked(where: str, note: Note = print_notice) -> Path:
    """The unpacked content of the packed file at `where`, in the cache folder; made if it is not
    there yet."""
    packed = open_file(where)
    key = blake2b(repr((where, sorted(packed.stamp.items()))).encode(), digest_size=12).hexdigest()
    name = Path(where).name.removesuffix(".gz").removesuffix(".tgz")
    folder = cache_folder() / "unpacked"
    with in_turn(lockable(where)):
        found = _kept(folder, key, name)
        if found is None:
            note(f"{where} is compressed; unpacking it once into {folder}")
            with _part_of(
                folder / f"{key}-{name}",
                _while_there_is_room(packed, folder, _pieces(packed, note)),
            ) as part:
                found = folder / _full_name(part, key, name)
                part.replace(found)
    return found


def _kept(folder: Path, key: str, name: str) -> Path | None:
    """The unpacked file from before; one that was changed since is removed."""
    for path in folder.glob(f"{key}-*-{escape(name)}"):
        if path.name == _full_name(path, key, name):
            return path
        path.unlink(missing_ok=True)
    return None


def _full_name(path: Path, key: str, name: str) -> str:
    """What an unpacked file is called that has the length and time of the one at `path`."""
    found = path.stat()
    return f"{key}-{found.st_size}-{int(found.st_mtime)}-{name}"


def open_content(where: str, packed: bool, stamp: Stamp) -> File:
    """The file at `where`, in its unpacked form if it is `packed`; it must still be the one with
    that `stamp`."""
    file = open_file(where)
    if file.stamp != stamp:
        raise DataError(f"{where}: was changed after it was opened; start again")
    return LocalFile(unpacked(where)) if packed else file


def is_doubtful(content: memoryview) -> bool:
    """Whether unpacked content may be wrong anywhere, since its compressed bytes were damaged."""
    return content[-len(DAMAGED) :] == DAMAGED


@contextmanager
def all_content(file: File, packed: bool) -> Iterator[memoryview]:
    """All plain bytes of a file, for one walk through them.

    A remote one is copied into the cache for as long as that takes.
    """
    if packed:
        yield LocalFile(unpacked(file.name)).view
    elif isinstance(file, LocalFile):
        yield file.view
    else:
        yield _copy(file)


@contextmanager
def _part_of(target: Path, pieces: Iterator[bytes]) -> Iterator[Path]:
    """A file with these `pieces`, on its way to `target`; gone afterwards, unless it got there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        with new_part(target) as part:
            with part.open("wb") as out:
                out.writelines(pieces)
            # In even seconds: some file systems keep no others, and change the time later.
            now = int(part.stat().st_mtime) // 2 * 2
            os.utime(part, (now, now))
            yield part
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{target}: cannot be written: {reason}; ALLSTEP_CACHE names another folder"
        ) from error


def _copy(file: File) -> memoryview:
    """The content of a remote file, mapped from a copy that has no name any more: the last view's
    end frees it, or the process's."""
    target = cache_folder() / "index" / f"walk-{os.getpid()}-{id(file)}"
    pieces = ((start, bytes(file.read(start, _PIECE))) for start in range(0, file.size, _PIECE))
    with _part_of(target, _while_there_is_room(file, target.parent, pieces)) as part:
        return LocalFile(part).view


def _while_there_is_room(
    file: File, folder: Path, pieces: Iterator[tuple[int, bytes]]
) -> Iterator[bytes]:
    """Yield the content of `pieces`; DataError when `folder` has no room for more.

    pieces: bytes of `file` that were read so far, and what came of the last of them.
    """
    # What comes out is seldom less than what goes in: a disk that cannot hold that is full at once.
    _check_room(file, folder, file.size, 0, 0)
    written = 0
    for read, piece in pieces:
        _check_room(file, folder, len(piece), read, written)
        yield piece
        written += len(piece)


def _check_room(file: File, folder: Path, wanted: int, read: int, written: int) -> None:
    """Raise DataError unless `wanted` bytes fit into `folder`.

    `written` bytes are there already; they came of `read` bytes of `file`.
    """
    disk = shutil.disk_usage(folder)
    kept = min(_KEPT_FREE, disk.total // _PART_KEPT_FREE)
    if disk.free - kept >= wanted:
        return
    so_far = (
        f"{nbytes(written)} came of {nbytes(read)} (factor {written / read:.1f}) so far, and "
        if read
        else ""
    )
    room = f"{folder} has {nbytes(disk.free)} free, of which {nbytes(kept)} stay free"
    raise DataError(
        f"{file.name}: no room for its content: {so_far}{room}; make room, or name another folder"
        " with ALLSTEP_CACHE"
    )


def _pieces(packed: File, note: Note) -> Iterator[tuple[int, bytes]]:
    """Yield packed bytes read so far and the unpacked bytes that came; at an early end the mark."""
    machine, done = zlib.decompressobj(_EITHER), 0
    try:
        for start in range(0, packed.size, _CHUNK):
            chunk = bytes(packed.read(start, _CHUNK))
            while chunk:
                if machine.eof:  # one stream may follow another; zeros are padding
                    if not (chunk := chunk.lstrip(b"\0")):
                        break
                    machine = zlib.decompressobj(_EITHER)
                done = start
                piece = machine.decompress(chunk, _PIECE)
                chunk = machine.unconsumed_tail or machine.unused_data
                yield min(start + _CHUNK, packed.size) - len(chunk), piece
        yield packed.size, machine.flush()
        if not machine.eof:
            note(
                f"{packed.name}: its compressed stream does not end within its {packed.size} bytes;"
                " what comes before is used"
            )
            yield packed.size, CUT
    except zlib.error as error:
        note(
            f"{packed.name}: its compressed bytes are damaged near byte {done} or before ({error})"
        )
        yield packed.size, DAMAGED
