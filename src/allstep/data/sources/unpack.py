"""Unpack files that are compressed as a whole (`x.tfrecord.gz`, `x.tar.gz`) into the cache.

Such files have no random access, so they are unpacked once:

```
ALLSTEP_CACHE/unpacked/<key>-<bytes>-<time>-<name>

key: a hash of the path or URL and its stamp, so that a changed file is unpacked again
```

The unpacked file appears complete, by a rename. Its name contains its length and modification time.
If it was truncated or changed since (full disk, cache cleaner), it is unpacked again: an index
built from it would lack samples.

If the packed file is cut or damaged, all bytes before the damage are kept, followed by a mark that
is neither a record nor a member of a tar. Every reader then finds damage there instead of an
end. There are two marks. In a file that was cut, all bytes before the mark are sound. If compressed
bytes or a checksum are wrong, it is unknown which of the bytes before the mark are right: TFRecords
have checksums of their own; a tar has none, so all of its samples are bad (`is_doubtful`).

The first bytes show the compression: gzip, or zlib as TensorFlow writes it.

**Disk space.** A few megabytes can unpack to a thousand times as much. The free space is checked
before and while a file is written; 1 GB, or 5% of a small disk, stays free.
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
# zlib's value for: detect gzip or zlib from the first bytes.
_DETECT = 47
# Packed bytes that are read, and unpacked bytes that are written, at a time.
_PACKED_CHUNK, _CHUNK = 1 << 16, 1 << 22
# Bytes of the disk that stay free, but at most one part in 20 of the disk.
_KEPT_FREE, _PART_KEPT_FREE = 1 << 30, 20

Note = Callable[[str], None]
"""Shows a line of text to the user."""


def packing(head: bytes | memoryview) -> str | None:
    """Return the compression that the first bytes of a file indicate: "gzip", "zlib" or None.

    "zlib" is a guess, since it has no magic number.
    """
    if bytes(head[:2]) == b"\x1f\x8b":
        return "gzip"
    looks_like_zlib = len(head) > 1 and head[0] & 0x8F == 8 and (head[0] << 8 | head[1]) % 31 == 0
    return "zlib" if looks_like_zlib else None


def unpacked(where: str, note: Note = print_notice) -> Path:
    """Return the path in the cache of the unpacked content of `where`; unpack it if needed.

    `note` shows the user a line before unpacking, and for damage (default: a notice on stderr).
    """
    packed = open_file(where)
    key = blake2b(repr((where, sorted(packed.stamp.items()))).encode(), digest_size=12).hexdigest()
    name = Path(where).name.removesuffix(".gz").removesuffix(".tgz")
    folder = cache_folder() / "unpacked"
    with in_turn(lockable(where)):
        found = _find_unpacked(folder, key, name)
        if found is None:
            note(f"{where} is compressed; unpacking it once into {folder}")
            chunks = _limited(packed, folder, _unpacked_chunks(packed, note))
            with _temporary(folder / f"{key}-{name}", chunks) as part:
                found = folder / _full_name(part, key, name)
                part.replace(found)
    return found


def _find_unpacked(folder: Path, key: str, name: str) -> Path | None:
    """Return the file that was unpacked earlier; remove one that was changed since."""
    for path in folder.glob(f"{key}-*-{escape(name)}"):
        if path.name == _full_name(path, key, name):
            return path
        path.unlink(missing_ok=True)
    return None


def _full_name(path: Path, key: str, name: str) -> str:
    """Return the name of the unpacked file at `path`, with its length and modification time."""
    found = path.stat()
    return f"{key}-{found.st_size}-{int(found.st_mtime)}-{name}"


def open_content(where: str, packed: bool, stamp: Stamp) -> File:
    """Open the file at `where`, or its unpacked content if it is `packed`.

    Raise DataError if its stamp is not `stamp`: it was changed.
    """
    file = open_file(where)
    if file.stamp != stamp:
        raise DataError(f"{where}: was changed after it was opened; start again")
    return LocalFile(unpacked(where)) if packed else file


def is_doubtful(content: memoryview) -> bool:
    """Return whether unpacked content may be wrong anywhere: its compressed bytes were damaged."""
    return content[-len(DAMAGED) :] == DAMAGED


@contextmanager
def all_content(file: File, packed: bool) -> Iterator[memoryview]:
    """Open all unpacked bytes of a file for one scan.

    A remote file is copied into the cache for the duration of the scan.
    """
    if packed:
        yield LocalFile(unpacked(file.name)).view
    elif isinstance(file, LocalFile):
        yield file.view
    else:
        yield _copy(file)


@contextmanager
def _temporary(target: Path, chunks: Iterator[bytes]) -> Iterator[Path]:
    """Write `chunks` to a temporary file next to `target`, and remove it after the block.

    The block may rename it. Raise DataError for an error of the file system.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        with new_part(target) as part:
            with part.open("wb") as out:
                out.writelines(chunks)
            # Even seconds: some file systems store no other times, and would change it later.
            now = int(part.stat().st_mtime) // 2 * 2
            os.utime(part, (now, now))
            yield part
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{target}: cannot be written: {reason}; set ALLSTEP_CACHE to another folder"
        ) from error


def _copy(file: File) -> memoryview:
    """Return the content of a remote file, mapped from a copy that was deleted after mapping.

    The end of the last view, or of the process, frees the disk space.
    """
    target = cache_folder() / "index" / f"walk-{os.getpid()}-{id(file)}"
    chunks = ((start, bytes(file.read(start, _CHUNK))) for start in range(0, file.size, _CHUNK))
    with _temporary(target, _limited(file, target.parent, chunks)) as part:
        return LocalFile(part).view


def _limited(file: File, folder: Path, chunks: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield the content of `chunks`; raise DataError if `folder` has no space for more.

    A chunk is the number of bytes of `file` read so far, and the bytes to write.
    """
    # Content is seldom smaller than its packed form: fail at once if even that does not fit.
    _check_space(file, folder, file.size, 0, 0)
    written = 0
    for read, chunk in chunks:
        _check_space(file, folder, len(chunk), read, written)
        yield chunk
        written += len(chunk)


def _check_space(file: File, folder: Path, wanted: int, read: int, written: int) -> None:
    """Raise DataError unless `wanted` bytes fit into `folder`.

    `written` bytes have been written; they are the content of `read` bytes of `file`.
    """
    disk = shutil.disk_usage(folder)
    kept = min(_KEPT_FREE, disk.total // _PART_KEPT_FREE)
    if disk.free - kept >= wanted:
        return
    so_far = (
        f"{nbytes(read)} unpacked to {nbytes(written)} (factor {written / read:.1f}) so far, and "
        if read
        else ""
    )
    space = f"{folder} has {nbytes(disk.free)} free, of which {nbytes(kept)} must stay free"
    raise DataError(
        f"{file.name}: not enough disk space for its content: {so_far}{space}; free some space, or"
        " set ALLSTEP_CACHE to another folder"
    )


def _unpacked_chunks(packed: File, note: Note) -> Iterator[tuple[int, bytes]]:
    """Yield the number of packed bytes read so far, and the next unpacked bytes.

    At a premature end, the last chunk is the mark `CUT` or `DAMAGED`.
    """
    stream, done = zlib.decompressobj(_DETECT), 0
    try:
        for start in range(0, packed.size, _PACKED_CHUNK):
            left = bytes(packed.read(start, _PACKED_CHUNK))
            while left:
                # One stream may follow another, with zeros as padding between them.
                if stream.eof:
                    if not (left := left.lstrip(b"\0")):
                        break
                    stream = zlib.decompressobj(_DETECT)
                done = start
                chunk = stream.decompress(left, _CHUNK)
                left = stream.unconsumed_tail or stream.unused_data
                yield min(start + _PACKED_CHUNK, packed.size) - len(left), chunk
        yield packed.size, stream.flush()
        if not stream.eof:
            note(
                f"{packed.name}: its compressed stream does not end within its {packed.size} bytes;"
                " the content before its end is used"
            )
            yield packed.size, CUT
    except zlib.error as error:
        note(
            f"{packed.name}: its compressed bytes are damaged near byte {done} or before ({error})"
        )
        yield packed.size, DAMAGED
