"""A checkpoint on disk: whole or absent.

```
checkpoints/
  000000055000/              samples seen, 12 digits
    weights.safetensors      parameters and buffers of the model, by name
    optimizer.safetensors    the optimizer's tensors, "<parameter>/<name>"
    state.json               position, the optimizer's numbers, best score so far, ...
    manifest.json            size and SHA-256 of the three others: written last
  .000000110000.4711-88231   being written by process 4711, or left by one that was killed; not read
```

Everything is written into a hidden folder, handed to the disk (fsync), and the folder gets its name
by one rename. A kill at any moment leaves the checkpoints that were there. Reading looks at every
byte: a checkpoint that is cut short, or has a flipped bit, is not used. Nor is one that is anything
else than what is written here: a pipe or a device in place of a file, JSON of a million brackets,
values of other types, a header of tensors that makes no sense, more bytes than the machine has
memory. Each of them is a `CheckpointError`, so that `newest` can report it and take the next older
one. No file is read but those four, whatever the manifest names.

Equal states give equal files, byte for byte: there is no time, host or number of workers in them.
No pickle is written or read.
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save

from allstep.console.escape import escaped
from allstep.errors import CheckpointError, ConfigError
from allstep.files.atomic import sync_folder
from allstep.files.bounded import MAX_JSON, open_regular, parse_json, read_json, read_regular
from allstep.train.checkpoint.names import hidden_name, is_left_over, name_of, number_of
from allstep.train.config.renamed import translated_state

FORMAT = 1
_WEIGHTS, _OPTIMIZER, _STATE, _MANIFEST = (
    "weights.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)
_PARTS = (_WEIGHTS, _OPTIMIZER, _STATE)

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """What a run needs to go on."""

    samples: int
    """Seen so far."""
    weights: Tensors
    optimizer: Tensors
    state: Mapping[str, Any]
    """Plain values."""


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Writes `snapshot` into `folder`; where it went.

    One of the same number is replaced. OSError when the disk does not take it.
    """
    name = name_of(snapshot.samples)
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    hidden = folder / hidden_name(name)
    hidden.mkdir()
    try:
        _write_parts(hidden, snapshot)
        _rename(hidden, folder / name)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return folder / name


def read(path: Path) -> Snapshot:
    """Return the checkpoint at `path`; CheckpointError when it is not whole."""
    if (samples := number_of(path.name)) is None:
        raise CheckpointError(f"{path}: is not the name of a checkpoint, which has 12 digits")
    try:
        _check(path)
        state = parse_json(read_regular(path / _STATE, MAX_JSON))
        if not isinstance(state, dict):
            raise ValueError(f"{_STATE}: expected keys and values, found {type(state).__name__}")
        return Snapshot(
            samples, _tensors(path / _WEIGHTS), _tensors(path / _OPTIMIZER), translated_state(state)
        )
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: does not fit into memory") from error
    except (
        ConfigError,
        ValueError,
    ) as error:  # the checksums are right, so it was written like that
        raise CheckpointError(
            f"{path}: is not a checkpoint of this version of allstep: {error}"
        ) from error


def _tensors(file: Path) -> Tensors:
    """The tensors in a file, in memory of their own: a mapped file that is cut short would end the
    process."""
    try:
        return {name: tensor.clone() for name, tensor in load_file(file).items()}
    except (MemoryError, OSError):
        raise
    except Exception as error:
        # A header may hold anything, and what torch makes of it is an error of any kind.
        words = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{file.name}: holds no tensors that can be read ({type(error).__name__}: {words})"
        ) from error


def written(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, the newest first, by their names alone."""
    return sorted(
        (path for path in _inside(folder) if number_of(path.name) is not None),
        reverse=True,
        key=_number,
    )


def _number(path: Path) -> int:
    return number_of(path.name) or 0


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if os.path.isdir(folder) else []  # noqa: PTH112  # Path's raises for some errors


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint, if there is one, and a line on each newer one that is not whole."""

    path: Path | None
    snapshot: Snapshot | None
    complaints: tuple[str, ...]


def newest(folder: Path, check: Callable[[Snapshot], None] = lambda snapshot: None) -> Newest:
    """Look from the newest on for one that is whole.

    check: raises CheckpointError for a snapshot that cannot be used; the one before is tried then.
    """
    try:
        names = _inside(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}") from error
    # Names such as "²" may hide a checkpoint that was renamed by mistake.
    odd = sorted(path for path in names if path.name.isdigit() and number_of(path.name) is None)
    complaints = [f"{path}: is not the name of a checkpoint, which has 12 digits" for path in odd]
    for path in written(folder):
        try:
            snapshot = read(path)
            check(snapshot)
            return Newest(path, snapshot, tuple(complaints))
        except CheckpointError as error:
            named = str(error) if str(path) in str(error) else f"{path}: {error}"
            complaints.append(escaped(named))
    return Newest(None, None, tuple(complaints))


def remove(path: Path) -> None:
    """Takes a checkpoint away: its name first, so that half of one is never seen."""
    hidden = path.with_name(f"{hidden_name(path.name)}.gone")
    with contextlib.suppress(OSError):
        path.rename(hidden)
        _delete(hidden)


def sweep(folder: Path) -> None:
    """Remove what killed writers left in `folder`."""
    for path in _inside(folder):
        if is_left_over(path.name):
            _delete(path)


def _delete(path: Path) -> None:
    """A file, link or pipe in place of a folder goes as well; `rmtree` would wait for the pipe."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def checksums(path: Path) -> Mapping[str, str]:
    """SHA-256 of each file of the checkpoint at `path`, as its manifest says."""
    return {name: entry.sha256 for name, entry in _manifest(path).items()}


def _write_parts(folder: Path, snapshot: Snapshot) -> None:
    state = json.dumps(snapshot.state, indent=1, sort_keys=True, allow_nan=False)
    contents = {
        _WEIGHTS: save(_apart(snapshot.weights)),
        _OPTIMIZER: save(_apart(snapshot.optimizer)),
        _STATE: state.encode(),
    }
    files = {
        name: {"nbytes": len(content), "sha256": _hash(content)}
        for name, content in contents.items()
    }
    contents[_MANIFEST] = json.dumps({"format": FORMAT, "files": files}, indent=1).encode()
    for name, content in contents.items():
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(folder)


def _apart(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Each with memory of its own, in the plain order of its elements: tied weights and
    channels-last ones are stored like others."""
    return {
        name: tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, tensor in tensors.items()
    }


def _rename(hidden: Path, final: Path) -> None:
    # Left by a run that was resumed from further back; a folder cannot be renamed onto a full one.
    if os.path.lexists(final):
        remove(final)
    hidden.rename(final)
    sync_folder(final.parent)


def _check(path: Path) -> None:
    """CheckpointError unless all parts have the bytes that the manifest says.

    Reads them piece by piece.
    """
    for name, (nbytes, expected) in _manifest(path).items():
        if (found := _digest(path / name, nbytes)) != expected:
            raise CheckpointError(
                f"{path / name}: its bytes changed: SHA-256 is {found[:12]}, expected"
                f" {expected[:12]}"
            )


class _Entry(NamedTuple):
    """What the manifest says of a file."""

    nbytes: int
    sha256: str


def _manifest(path: Path) -> dict[str, _Entry]:
    if not os.path.isdir(path):  # noqa: PTH112  # Path's raises for some errors
        raise CheckpointError(f"{path}: there is no such checkpoint")
    file = path / _MANIFEST
    try:
        manifest = read_json(file, MAX_JSON)
        entries = {name: _entry(manifest["files"][name]) for name in _PARTS}
        found = manifest.get("format")
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: is not a manifest ({type(error).__name__}: {error})"
        ) from error
    if found != FORMAT:
        raise CheckpointError(f"{path}: has format {str(found)[:40]}; this version reads {FORMAT}")
    return entries


def _entry(plain: Any) -> _Entry:
    nbytes, sha256 = plain["nbytes"], plain["sha256"]
    if (
        not isinstance(nbytes, int)
        or isinstance(nbytes, bool)
        or nbytes < 0
        or not isinstance(sha256, str)
    ):
        raise TypeError(
            f"expected a number of bytes and a SHA-256, found {str(nbytes)[:40]!r} and"
            f" {str(sha256)[:80]!r}"
        )
    return _Entry(nbytes, sha256)


def _digest(file: Path, nbytes: int) -> str:
    """The SHA-256 of a part, which must be as long as its manifest says and fit into memory."""
    limit = MAX_JSON if file.name == _STATE else _memory()
    try:
        with open_regular(file) as opened:
            found = os.fstat(opened.fileno()).st_size
            if found != nbytes:
                raise CheckpointError(f"{file}: expected {nbytes} bytes, found {found}")
            if found > limit:
                raise CheckpointError(f"{file}: is larger than {limit:,} bytes, the limit here")
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from error


def _memory() -> int:
    """Bytes of memory of this machine: a file with holes may claim more than any disk has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
