"""The files of a dataset: a list of files, a folder, a pattern, or a single file; local or remote.

```
train/                        all shards in the folder, sorted by name; the caller decides which
                              file names are shards
train/x-*.tfrecord            a glob pattern; matches sorted by name
x-{00000..00127}.tfrecord     braces, as in a shell or WebDataset: a range of numbers with leading
                              zeros, or {a,b}
[a, b, ...]                   each of them, in this order
```

`classes.txt` next to the shards contains the names of the classes, one per line.

Hidden files are never shards. The order of the files determines the numbers of the samples, so it
never depends on the order in which a file system lists a folder.
"""

import glob
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

from allstep.data.sources.open_file import (
    is_absent,
    is_refused,
    is_remote,
    is_web,
    local_path,
    open_file,
    reason_of,
    remote,
)
from allstep.errors import DataError

Where: TypeAlias = str | Path | Sequence[str | Path]

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)")
_MAX_DIGITS = 18
_MAX_NAMES = 1_000_000
# name-00002-of-00004.tfrecord
_NUMBERED = re.compile(r"(.+)-([0-9]{5,7})-of-([0-9]{5,7})(\D.*|)")
# Size limit of `classes.txt`, enough for a million names.
_MAX_CLASSES_NBYTES = 64 << 20
_GLOB = re.compile(r"[*?\[]")


def list_shards(where: Where, is_shard: Callable[[str], bool], what: str) -> list[str]:
    """Return the paths or URLs of all shards in `where`; raise DataError if there are none.

    `is_shard` decides by the name of a file in a folder; `what` is the name of such files in the
    error.
    """
    given = [where] if isinstance(where, str | Path) else list(where)
    found = [
        shard
        for one in given
        for pattern in expand_braces(str(one))
        for shard in _matches(pattern, is_shard)
    ]
    if not found:
        raise DataError(f"{where}: has no {what}{_what_instead(given)}")
    return found


class Numbering:
    """Sample numbers 0..n-1 over shards, given the number of samples of each shard."""

    def __init__(self, counts: Iterable[int]) -> None:
        self._ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def locate(self, number: int) -> tuple[int, int]:
        """Return the number of the shard that contains sample `number`, and the row in it."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard - 1] if shard else 0)


def read_classes(shard: str) -> tuple[tuple[str, ...], DataError | None]:
    """Return the names in `classes.txt` next to `shard`, or () if there is no such file.

    If a server refuses it instead of reporting that it is missing, also return the error to raise
    where labels would be numbered by it: it may exist, with another order than the sorted one.

    Raise DataError if it exists but cannot be read: without it, labels would get other numbers.
    """
    folder, slash, _ = shard.rpartition("/")
    place = f"{folder}{slash}classes.txt"
    try:
        found = open_file(place)
        if found.size > _MAX_CLASSES_NBYTES:
            raise DataError(
                f"{place}: expected at most {_MAX_CLASSES_NBYTES} bytes, found {found.size}"
            )
        text = bytes(found.read(0, found.size)).decode("utf-8-sig")
    except DataError as error:
        if is_absent(place, error.__cause__):
            return (), _refusal(error)
        raise DataError(
            f"{error}; labels are numbered by it: make it readable, or remove it"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: expected one name per line in UTF-8, found {error}") from error
    return _names_in(place, text), None


def _refusal(error: DataError) -> DataError | None:
    """Return the error for labels that a refused `classes.txt` would number; None if missing."""
    if not is_refused(error.__cause__):
        return None
    refusal = DataError(
        f"{error}; labels that are texts are numbered by it: make it readable, put one there (a"
        " name per line), or copy the data to this machine"
    )
    refusal.__cause__ = error
    return refusal


def _names_in(place: str, text: str) -> tuple[str, ...]:
    """Return the names in a list of classes; raise DataError for an empty line.

    To skip an empty line would change the labels of all names after it.
    """
    names = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text.strip() else []
    for line, name in enumerate(names, 1):
        if not name.strip() or len(name.splitlines()) != 1:
            raise DataError(
                f"{place}, line {line}: expected the name of a class, found {name[:40]!r}"
            )
    return tuple(names)


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield all names that a pattern with braces expands to."""
    found = _BRACES.search(pattern)
    if not found or _exists(pattern):
        yield pattern
        return
    for choice in _choices(found[1]):
        yield from expand_braces(pattern[: found.start()] + choice + pattern[found.end() :])


def _exists(name: str) -> bool:
    """Return whether there is a file `name`; a pattern may be longer than any file name."""
    try:
        return Path(name).exists()
    except OSError:
        return False


def _choices(inside: str) -> list[str]:
    """Return the alternatives of the text inside a pair of braces."""
    if not (numbers := _RANGE.fullmatch(inside)):
        return inside.split(",")
    first, last = numbers.groups()
    if max(len(first), len(last)) > _MAX_DIGITS:
        raise DataError(f"{{{inside[:60]}}}: expected numbers of at most {_MAX_DIGITS} digits")
    if int(last) < int(first):
        raise DataError(f"{{{inside}}}: expected increasing numbers, found {first} before {last}")
    count = int(last) - int(first) + 1
    if count > _MAX_NAMES:
        raise DataError(f"{{{inside}}}: expected at most {_MAX_NAMES} files, found {count}")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _matches(pattern: str, is_shard: Callable[[str], bool]) -> list[str]:
    """Return the shards of a folder, file or pattern."""
    find = _remote_matches if is_remote(pattern) else _local_matches
    return find(pattern, is_shard)


def _local_matches(pattern: str, is_shard: Callable[[str], bool]) -> list[str]:
    path = local_path(pattern)
    if path.is_dir():
        visible = (entry.name for entry in path.iterdir() if not entry.name.startswith("."))
        names = [name for name in visible if is_shard(name)]
        check_complete(pattern, names)
        return [str(path.absolute() / name) for name in sorted(names)]
    if path.exists():
        return [str(path.absolute())]
    if _GLOB.search(pattern):
        # Path.glob takes no absolute patterns.
        found = map(Path, sorted(glob.glob(str(path))))  # noqa: PTH207
        return [str(each.absolute()) for each in found if not each.is_dir()]
    raise DataError(f"{pattern}: no such file or folder")


def check_complete(folder: str, names: Iterable[str]) -> None:
    """Raise DataError if shards of a folder are missing, as after an incomplete copy, or double."""
    names = list(names)
    _check_once(folder, names)
    found: dict[tuple[str, str, str], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        found.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (stem, total, suffix), numbers in found.items():
        missing = sorted(set(range(min(int(total), _MAX_NAMES))) - numbers)
        if missing:
            first = f"{stem}-{missing[0]:0{len(total)}}-of-{total}{suffix}"
            some = (
                f"the first is {first}; copy them, or select the others with a pattern:"
                f" '{folder}/{stem}-*{suffix}'"
            )
            raise DataError(f"{folder}: {len(missing)} of {int(total)} shards are missing, {some}")


def _check_once(folder: str, names: Sequence[str]) -> None:
    """Raise DataError if a folder has the same samples twice.

    They were packed again next to the old shards, or are there compressed and uncompressed.
    """
    totals: dict[tuple[str, str], str] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        stem, total, suffix = match[1], match[3], match[4]
        first = totals.setdefault((stem, suffix), total)
        if first != total:
            both = f"{stem}-*-of-{first}{suffix} and {stem}-*-of-{total}{suffix}"
            raise DataError(
                f"{folder}: contains shards of two datasets: {both}; remove the old ones, or select"
                " shards with a pattern"
            )
    plain = set(names)
    for name in names:
        unpacked = f"{name[:-4]}.tar" if name.endswith(".tgz") else name.removesuffix(".gz")
        if unpacked != name and unpacked in plain:
            raise DataError(
                f"{folder}: {unpacked} and {name} contain the same samples; remove one of them"
            )


def list_folder(url: str) -> list[str] | None:
    """Return the URLs of all entries of a remote folder; None if `url` is no folder."""
    system, path = remote(url)
    try:
        if not system.isdir(path):
            return None
        return [system.unstrip_protocol(name) for name in system.ls(path, detail=False)]
    except DataError:
        raise
    # Each file system of fsspec has its own exceptions.
    except Exception as error:
        raise DataError(f"{url}: cannot be listed: {reason_of(error)}") from error


def _remote_matches(url: str, is_shard: Callable[[str], bool]) -> list[str]:
    system, path = remote(url)
    try:
        if _is_pattern(url):
            return sorted(system.unstrip_protocol(name) for name in system.glob(path))
        # On a web server, only reading a URL shows whether it is a folder: go by its name.
        if is_web(url) and is_shard(url.partition("?")[0].rpartition("/")[2]):
            return [url]
        if not system.isdir(path):
            return [url]
        files = [entry["name"] for entry in system.ls(path, detail=True) if entry["type"] == "file"]
        paths = {name.rsplit("/", 1)[-1]: name for name in files}
        shards = {name: path for name, path in paths.items() if is_shard(name)}
        check_complete(url.rstrip("/"), shards)
        return sorted(map(system.unstrip_protocol, shards.values()))
    except DataError:
        raise
    # Each file system of fsspec has its own exceptions.
    except Exception as error:
        raise DataError(f"{url}: cannot be listed: {reason_of(error)}") from error


def _is_pattern(url: str) -> bool:
    """Return whether `url` is a glob pattern; in a web address, a "?" begins the query."""
    return _GLOB.search(url.partition("?")[0] if is_web(url) else url) is not None


def _what_instead(given: list[str | Path]) -> str:
    """Return the first few names in a local folder, as the end of an error; "" for other places."""
    if len(given) != 1 or is_remote(given[0]) or not local_path(given[0]).is_dir():
        return ""
    names = sorted(
        path.name for path in local_path(given[0]).iterdir() if not path.name.startswith(".")
    )
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"; found {', '.join(names[:5])}{more}" if names else "; it is empty"
