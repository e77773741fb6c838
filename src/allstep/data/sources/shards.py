"""Which files a set consists of: a list of them, a folder, a pattern, or a single one; here or
behind a URL.

```
train/                        all shards in the folder (what a shard is called, the caller says), by name
train/x-*.tfrecord            a pattern for glob, by name
x-{00000..00127}.tfrecord     braces, as a shell or WebDataset writes them: numbers with leading zeros, or {a,b}
[a, b, ...]                   each of them, in this order
```

`classes.txt` beside the shards holds the names of the classes, one a line.

Hidden files are never shards. The order is the numbering of the samples, so it never depends on how
a folder happens to be listed.
"""

import glob
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

from allstep.data.sources.files import (
    is_absent,
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
_MOST_DIGITS = 18
_MOST_NAMES = 1_000_000
# name-00002-of-00004.tfrecord
_NUMBERED = re.compile(r"(.+)-([0-9]{5,7})-of-([0-9]{5,7})(\D.*|)")
# Of `classes.txt`: a million names.
_MAX_CLASSES_NBYTES = 64 << 20
_GLOB = re.compile(r"[*?\[]")


def list_shards(where: Where, is_shard: Callable[[str], bool], what: str) -> list[str]:
    """Paths or URLs of all shards in `where`.

    `what` is their name in an error, when there are none.
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
    """Numbers 0..n-1 over shards of so many samples each."""

    def __init__(self, counts: Iterable[int]) -> None:
        self._ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def locate(self, number: int) -> tuple[int, int]:
        """Which shard holds sample `number`, and which of its samples that is."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        shard = bisect_right(self._ends, number)
        return shard, number - (self._ends[shard - 1] if shard else 0)


def read_classes(shard: str) -> tuple[str, ...]:
    """Return the names in `classes.txt` next to `shard`, or () where there is no such file.

    A file that is there and cannot be read is an error: without it, labels would get other numbers.
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
            return ()
        raise DataError(
            f"{error}; labels are numbered by it: make it readable, or remove it"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: expected one name a line in UTF-8, found {error}") from error
    return _names_in(place, text)


def _names_in(place: str, text: str) -> tuple[str, ...]:
    """The lines of a list of classes.

    One that is empty would give all names after it other labels.
    """
    names = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text.strip() else []
    for line, name in enumerate(names, 1):
        if not name.strip() or len(name.splitlines()) != 1:
            raise DataError(
                f"{place}, line {line}: expected the name of a class, found {name[:40]!r}"
            )
    return tuple(names)


def expand_braces(pattern: str) -> Iterator[str]:
    """All names that `pattern` stands for."""
    found = _BRACES.search(pattern)
    if not found or _is_there(pattern):
        yield pattern
        return
    for choice in _choices(found[1]):
        yield from expand_braces(pattern[: found.start()] + choice + pattern[found.end() :])


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # a pattern may be longer than any file's name
        return False


def _choices(inside: str) -> list[str]:
    if not (numbers := _RANGE.fullmatch(inside)):
        return inside.split(",")
    first, last = numbers.groups()
    if max(len(first), len(last)) > _MOST_DIGITS:
        raise DataError(f"{{{inside[:60]}}}: expected numbers of at most {_MOST_DIGITS} digits")
    if int(last) < int(first):
        raise DataError(f"{{{inside}}}: expected numbers that go up, found {first} before {last}")
    if int(last) - int(first) >= _MOST_NAMES:
        raise DataError(
            f"{{{inside}}}: expected at most {_MOST_NAMES} files, found"
            f" {int(last) - int(first) + 1}"
        )
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _matches(pattern: str, is_shard: Callable[[str], bool]) -> list[str]:
    return (
        _remote_matches(pattern, is_shard)
        if is_remote(pattern)
        else _local_matches(pattern, is_shard)
    )


def _local_matches(pattern: str, is_shard: Callable[[str], bool]) -> list[str]:
    path = local_path(pattern)
    if path.is_dir():
        names = [
            entry.name
            for entry in path.iterdir()
            if not entry.name.startswith(".") and is_shard(entry.name)
        ]
        check_complete(pattern, names)
        return [str(path.absolute() / name) for name in sorted(names)]
    if path.exists():
        return [str(path.absolute())]
    if _GLOB.search(pattern):
        return [
            str(Path(name).absolute())
            for name in sorted(glob.glob(str(path)))  # noqa: PTH207
            if not Path(name).is_dir()
        ]
    raise DataError(f"{pattern}: no such file or folder")


def check_complete(folder: str, names: Iterable[str]) -> None:
    """DataError when shards in a folder are missing (a copy that stopped halfway), or there twice."""
    names = list(names)
    _check_once(folder, names)
    found: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            found.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (stem, total, suffix), numbers in found.items():
        missing = sorted(set(range(min(int(total), _MOST_NAMES))) - numbers)
        if missing:
            first = f"{stem}-{missing[0]:0{len(total)}}-of-{total}{suffix}"
            some = (
                f"the first is {first}; copy them, or name those to read by a pattern:"
                f" '{folder}/{stem}-*{suffix}'"
            )
            raise DataError(f"{folder}: {len(missing)} of {int(total)} shards are missing, {some}")


def _check_once(folder: str, names: Sequence[str]) -> None:
    """DataError when the same samples are there twice: packed anew beside the old ones, or
    compressed and not."""
    totals: dict[tuple[str, str], str] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            total = totals.setdefault((match[1], match[4]), match[3])
            if total != match[3]:
                raise DataError(
                    f"{folder}: holds shards of two sets: {match[1]}-*-of-{total}{match[4]} and"
                    f" {match[1]}-*-of-{match[3]}{match[4]}; remove the old ones, or name those to"
                    " read by a pattern"
                )
    plain = set(names)
    for name in names:
        unpacked = f"{name[:-4]}.tar" if name.endswith(".tgz") else name.removesuffix(".gz")
        if unpacked != name and unpacked in plain:
            raise DataError(
                f"{folder}: {unpacked} and {name} hold the same samples: remove one of them"
            )


def list_folder(url: str) -> list[str] | None:
    """URLs of all that is in a remote folder; None where `url` is no folder."""
    system, path = remote(url)
    try:
        if not system.isdir(path):
            return None
        return [system.unstrip_protocol(name) for name in system.ls(path, detail=False)]
    except DataError:
        raise
    except Exception as error:  # each of fsspec's many systems has errors of its own
        raise DataError(f"{url}: cannot be listed: {reason_of(error)}") from error


def _remote_matches(url: str, is_shard: Callable[[str], bool]) -> list[str]:
    system, path = remote(url)
    try:
        if _is_pattern(url):
            return sorted(system.unstrip_protocol(name) for name in system.glob(path))
        # To a web server a folder is a file like others, which had to be read to tell.
        if is_web(url) and is_shard(url.partition("?")[0].rpartition("/")[2]):
            return [url]
        if not system.isdir(path):
            return [url]
        files = [entry["name"] for entry in system.ls(path, detail=True) if entry["type"] == "file"]
        shards = {
            name.rsplit("/", 1)[-1]: name for name in files if is_shard(name.rsplit("/", 1)[-1])
        }
        check_complete(url.rstrip("/"), shards)
        return sorted(map(system.unstrip_protocol, shards.values()))
    except DataError:
        raise
    except Exception as error:  # each of fsspec's many systems has errors of its own
        raise DataError(f"{url}: cannot be listed: {reason_of(error)}") from error


def _is_pattern(url: str) -> bool:
    # In a web address, a "?" begins the query.
    return _GLOB.search(url.partition("?")[0] if is_web(url) else url) is not None


def _what_instead(given: list[str | Path]) -> str:
    """For a folder: the first few names in it."""
    if len(given) != 1 or is_remote(given[0]) or not local_path(given[0]).is_dir():
        return ""
    names = sorted(
        path.name for path in local_path(given[0]).iterdir() if not path.name.startswith(".")
    )
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"; found {', '.join(names[:5])}{more}" if names else "; it is empty"
