"""A checkpoint on disk: whole or absent.

```
checkpoints/
  000000055000/              samples seen, 12 digits
    weights.safetensors      parameters and buffers of the model, by name
    optimizer.safetensors    the optimizer's tensors, "<parameter>/<name>"
    state.json               position, the optimizer's numbers, best score so far, ...
    manifest.json            size and SHA-256 of the three others: written last
  .000000110000.4711-88231   being written by process 4711, or left by a killed one; not read
```

All files are written into a hidden folder and flushed to the disk (fsync); then one rename gives
the folder its name. A kill at any moment leaves the earlier checkpoints intact.

Reading verifies every byte. A checkpoint that is truncated or has a flipped bit is not used, nor
one that differs from this description: a pipe or a device instead of a file, deeply nested JSON,
values of other types, an invalid header of tensors, more bytes than the machine has memory. Each of
these is a `CheckpointError`, so that `newest` can report it and use the next older checkpoint. Only
the four files are read, whatever the manifest names.

Equal states give equal files, byte for byte: they contain no time, host or number of workers. No
pickle is written or read.
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
_WEIGHTS, _OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
_STATE, _MANIFEST = "state.json", "manifest.json"
_HASHED = (_WEIGHTS, _OPTIMIZER, _STATE)
"""Files whose size and SHA-256 are in the manifest."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Snapshot:
    """State of a run from which it can resume."""

    samples: int
    """Samples trained on so far."""
    weights: Tensors
    """Parameters and buffers of the model, by name."""
    optimizer: Tensors
    """Tensors of the optimizer, by "<parameter>/<name>"."""
    state: Mapping[str, Any]
    """Everything else, as plain values for JSON."""


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write `snapshot` as a checkpoint into `folder`, and return its path.

    A checkpoint of the same number of samples is replaced. Raise OSError if it cannot be written.
    """
    name = name_of(snapshot.samples)
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    hidden = folder / hidden_name(name)
    hidden.mkdir()
    try:
        _write_files(hidden, snapshot)
        _rename(hidden, folder / name)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return folder / name


def read(path: Path) -> Snapshot:
    """Return the checkpoint at `path`; raise CheckpointError if it is not whole."""
    if (samples := number_of(path.name)) is None:
        raise CheckpointError(f"{path}: is not the name of a checkpoint, which has 12 digits")
    try:
        _check(path)
        state = parse_json(read_regular(path / _STATE, MAX_JSON))
        if not isinstance(state, dict):
            raise ValueError(f"{_STATE}: expected keys and values, found {type(state).__name__}")
        weights, optimizer = _tensors(path / _WEIGHTS), _tensors(path / _OPTIMIZER)
        return Snapshot(samples, weights, optimizer, translated_state(state))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: does not fit into memory") from error
    except (ConfigError, ValueError) as error:
        # The checksums are right, so the file was written with this content.
        problem = "is not a checkpoint of this version of allstep"
        raise CheckpointError(f"{path}: {problem}: {error}") from error


def _tensors(file: Path) -> Tensors:
    """Return the tensors of a file as copies.

    A mapped file would end the process with a signal if it were truncated later.
    """
    try:
        return {name: tensor.clone() for name, tensor in load_file(file).items()}
    except (MemoryError, OSError):
        raise
    except Exception as error:
        # A damaged header can cause an error of any type.
        text = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{file.name}: holds no tensors that can be read ({type(error).__name__}: {text})"
        ) from error


def written(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, the newest first, by their names alone."""
    return sorted(
        (path for path in _inside(folder) if number_of(path.name) is not None),
        reverse=True,
        key=_number,
    )


def _number(path: Path) -> int:
    """Return the samples of a checkpoint by its name."""
    return number_of(path.name) or 0


def _inside(folder: Path) -> list[Path]:
    """Return the paths in `folder`; none if it is not a folder."""
    # `Path.is_dir` raises for some errors, `os.path.isdir` does not.
    return list(folder.iterdir()) if os.path.isdir(folder) else []  # noqa: PTH112


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint, if there is one."""

    path: Path | None
    snapshot: Snapshot | None
    complaints: tuple[str, ...]
    """One line about each newer checkpoint that cannot be used."""


def newest(folder: Path, check: Callable[[Snapshot], None] = lambda snapshot: None) -> Newest:
    """Return the newest checkpoint in `folder` that is whole and passes `check`.

    `check` raises CheckpointError for a snapshot that cannot be used; the next older one is tried
    then. Raise CheckpointError if the folder cannot be read.
    """
    try:
        names = _inside(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}") from error
    complaints = _odd_names(names)
    for path in written(folder):
        try:
            snapshot = read(path)
            check(snapshot)
            return Newest(path, snapshot, tuple(complaints))
        except CheckpointError as error:
            named = str(error) if str(path) in str(error) else f"{path}: {error}"
            complaints.append(escaped(named))
    return Newest(None, None, tuple(complaints))


def _odd_names(paths: list[Path]) -> list[str]:
    """Return a line about each name of digits that is not the name of a checkpoint.

    A name such as "²" may be a checkpoint that was renamed by mistake.
    """
    odd = sorted(path for path in paths if path.name.isdigit() and number_of(path.name) is None)
    return [f"{path}: is not the name of a checkpoint, which has 12 digits" for path in odd]


def remove(path: Path) -> None:
    """Remove a checkpoint.

    It is renamed to a hidden name first, so that a partly removed checkpoint is never read.
    """
    hidden = path.with_name(f"{hidden_name(path.name)}.gone")
    with contextlib.suppress(OSError):
        path.rename(hidden)
        _delete(hidden)


def sweep(folder: Path) -> None:
    """Remove the hidden folders that killed writers left in `folder`."""
    for path in _inside(folder):
        if is_left_over(path.name):
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a folder, or a file, link or pipe in its place; ignore errors.

    `rmtree` alone would wait for a pipe.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def checksums(path: Path) -> Mapping[str, str]:
    """Return the SHA-256 of each file of the checkpoint at `path`, from its manifest."""
    return {name: entry.sha256 for name, entry in _manifest(path).items()}


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    """Write the four files of a checkpoint into `folder` and flush them to the disk."""
    state = json.dumps(snapshot.state, indent=1, sort_keys=True, allow_nan=False)
    contents = {
        _WEIGHTS: save(_separate(snapshot.weights)),
        _OPTIMIZER: save(_separate(snapshot.optimizer)),
        _STATE: state.encode(),
    }
    files = {name: _describe(content) for name, content in contents.items()}
    contents[_MANIFEST] = json.dumps({"format": FORMAT, "files": files}, indent=1).encode()
    for name, content in contents.items():
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(folder)


def _describe(content: bytes) -> dict[str, int | str]:
    """Return the manifest's entry of a file."""
    return {"nbytes": len(content), "sha256": _hash(content)}


def _hash(content: bytes) -> str:
    """Return the SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def _separate(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return copies on the CPU, each contiguous and in memory of its own.

    So tied weights and channels-last weights are stored like all others.
    """
    return {
        name: tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, tensor in tensors.items()
    }


def _rename(hidden: Path, final: Path) -> None:
    """Give the hidden folder its final name, and flush that to the disk."""
    # It exists if the run was resumed from an older checkpoint. Renaming onto it would fail.
    if os.path.lexists(final):
        remove(final)
    hidden.rename(final)
    sync_folder(final.parent)


def _check(path: Path) -> None:
    """Raise CheckpointError unless all files have the bytes that the manifest states."""
    for name, (nbytes, expected) in _manifest(path).items():
        if (found := _digest(path / name, nbytes)) != expected:
            raise CheckpointError(
                f"{path / name}: its bytes changed: SHA-256 is {found[:12]}, expected"
                f" {expected[:12]}"
            )


class _Entry(NamedTuple):
    """Size and checksum of a file in the manifest."""

    nbytes: int
    sha256: str


def _manifest(path: Path) -> dict[str, _Entry]:
    """Return the entries of the manifest; raise CheckpointError if it is invalid."""
    # `Path.is_dir` raises for some errors, `os.path.isdir` does not.
    if not os.path.isdir(path):  # noqa: PTH112
        raise CheckpointError(f"{path}: there is no such checkpoint")
    file = path / _MANIFEST
    try:
        manifest = read_json(file, MAX_JSON)
        entries = {name: _entry(manifest["files"][name]) for name in _HASHED}
        found = manifest.get("format")
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file}: is not a manifest ({reason})") from error
    if found != FORMAT:
        raise CheckpointError(f"{path}: has format {str(found)[:40]}; this version reads {FORMAT}")
    return entries


def _entry(plain: Any) -> _Entry:
    """Return an entry of the manifest; raise TypeError or KeyError if it is invalid."""
    nbytes, sha256 = plain["nbytes"], plain["sha256"]
    is_size = isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes >= 0
    if not is_size or not isinstance(sha256, str):
        raise TypeError(
            f"expected a number of bytes and a SHA-256, found {str(nbytes)[:40]!r} and"
            f" {str(sha256)[:80]!r}"
        )
    return _Entry(nbytes, sha256)


def _digest(file: Path, nbytes: int) -> str:
    """Return the SHA-256 of a file, which must have `nbytes` bytes and fit into memory."""
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
    """Return the bytes of memory of this machine, the limit of a file's size.

    A sparse file may claim more bytes than any disk has.
    """
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
