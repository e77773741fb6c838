"""A checkpoint on disk: whole or absent.

```
checkpoints/
  000000055000/              samples seen, 12 digits
    weights.safetensors      parameters and buffers of the net, by name
    optimizer.safetensors    the optimizer's tensors, "<parameter>/<name>"
    state.json               position, the optimizer's numbers, best score so far, ...
    manifest.json            size and SHA-256 of the three others: written last
  .000000110000.4711         being written by process 4711, or left by one that was killed; nobody reads it
```

Everything is written into a hidden folder, handed to the disk (fsync), and the folder gets its name by one rename. A kill at any moment
leaves the checkpoints that were there. Reading looks at every byte: a checkpoint that is cut short, or has a flipped bit, is not used.

Equal states give equal files, byte for byte: there is no time, host or number of workers in them. No pickle is written or read.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from allstep.errors import CheckpointError

FORMAT = 1
_WEIGHTS, _OPTIMIZER, _STATE, _MANIFEST = "weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
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
    """Writes `snapshot` into `folder`; where it went. One of the same number is replaced. OSError when the disk does not take it."""
    name = f"{snapshot.samples:012}"
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    hidden = folder / f".{name}.{os.getpid()}"
    hidden.mkdir()
    try:
        _write_parts(hidden, snapshot)
        _rename(hidden, folder / name)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return folder / name


def read(path: Path) -> Snapshot:
    """The checkpoint at `path`. Raises CheckpointError when it is not whole."""
    contents = _checked(path)
    try:
        state = json.loads(contents[_STATE])
        return Snapshot(int(path.name), load(contents[_WEIGHTS]), load(contents[_OPTIMIZER]), state)
    except (ValueError, SafetensorError) as error:  # the checksums are right, so it was written like that
        raise CheckpointError(f"{path}: is not a checkpoint of this version of allstep: {error}") from error


def written(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the newest first; nobody has looked into them yet."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))[::-1]


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint, if there is one, and a line on each newer one that is not whole."""

    path: Path | None
    snapshot: Snapshot | None
    complaints: tuple[str, ...]


def newest(folder: Path) -> Newest:
    """Looks from the newest on for one that is whole."""
    complaints: list[str] = []
    for path in written(folder):
        try:
            return Newest(path, read(path), tuple(complaints))
        except CheckpointError as error:
            complaints.append(str(error))
    return Newest(None, None, tuple(complaints))


def remove(path: Path) -> None:
    """Takes a checkpoint away: its name first, so that half of one is never seen."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.gone")
    with contextlib.suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def checksums(path: Path) -> Mapping[str, str]:
    """SHA-256 of each file of the checkpoint at `path`, as its manifest says."""
    return {name: str(entry["sha256"]) for name, entry in _manifest(path).items()}


def _write_parts(folder: Path, snapshot: Snapshot) -> None:
    state = json.dumps(snapshot.state, indent=1, sort_keys=True, allow_nan=False)
    contents = {
        _WEIGHTS: save(_apart(snapshot.weights)),
        _OPTIMIZER: save(_apart(snapshot.optimizer)),
        _STATE: state.encode(),
    }
    files = {name: {"nbytes": len(content), "sha256": _hash(content)} for name, content in contents.items()}
    contents[_MANIFEST] = json.dumps({"format": FORMAT, "files": files}, indent=1).encode()
    for name, content in contents.items():
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    _sync(folder)


def _apart(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Each with memory of its own, in the plain order of its elements: tied weights and channels-last ones are stored like others."""
    return {
        name: tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, tensor in tensors.items()
    }


def _rename(hidden: Path, final: Path) -> None:
    if final.exists():  # left by a run that was resumed from further back; a folder cannot be renamed onto a full one
        remove(final)
    hidden.rename(final)
    _sync(final.parent)


def _checked(path: Path) -> dict[str, bytes]:
    """The contents of the three parts, equal to what the manifest says."""
    contents = {}
    for name, entry in _manifest(path).items():
        content = _content(path / name)
        if len(content) != entry["nbytes"]:
            raise CheckpointError(f"{path / name}: expected {entry['nbytes']} bytes, found {len(content)}")
        if (found := _hash(content)) != entry["sha256"]:
            expected = str(entry["sha256"])
            raise CheckpointError(
                f"{path / name}: its bytes changed: SHA-256 is {found[:12]}, expected {expected[:12]}"
            )
        contents[name] = content
    return contents


def _manifest(path: Path) -> Mapping[str, Mapping[str, Any]]:
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such checkpoint")
    try:
        manifest = json.loads(_content(path / _MANIFEST))
        entries = {name: {key: manifest["files"][name][key] for key in ("nbytes", "sha256")} for name in _PARTS}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _MANIFEST}: is not a manifest ({type(error).__name__}: {error})") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: has format {manifest.get('format')}; this version reads {FORMAT}")
    return entries


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from error


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sync(folder: Path) -> None:
    """A rename is on the disk when the folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(folder: Path) -> None:
    """Removes what killed writers left."""
    for path in _hidden(folder):
        if not _is_running(path):
            shutil.rmtree(path, ignore_errors=True)


def _hidden(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.name.startswith(".") and path.name[1:13].isdigit())


def _is_running(path: Path) -> bool:
    """Whether the process in the name may still write: it lives and is not we, who write one checkpoint at a time."""
    number = path.name.split(".")[2]
    return number.isdigit() and int(number) != os.getpid() and Path(f"/proc/{number}").exists()
