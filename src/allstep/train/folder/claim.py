"""The run folder: where a run writes its files, and from where it is resumed.

```
DIR/config.yaml      what the run is: training from this file repeats it
DIR/run.jsonl        the run record
DIR/checkpoints/     where the run can resume
DIR/run.lock         locked by the process that trains here (`lock`)
DIR/run.seal         proof that this user trains a model of the user's own code here (`trust`)
```

A folder that holds a run is never overwritten: either the run is resumed (`--resume auto`), or the
new run needs another folder. A run record or a checkpoint is enough to count as a run; but where a
start was killed before it recorded a step, there is nothing to lose, and the same command starts
again. A config.yaml with other values is not overwritten either: it may be the only copy of what a
user wrote.
"""

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep import runlog
from allstep.data.opening import holds_class_folders
from allstep.errors import ConfigError
from allstep.files.atomic import create_file
from allstep.train.config.differences import differences
from allstep.train.config.read_config import read_layers
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.config.sync_config import SyncConfig
from allstep.train.config.trust import SEAL, seal
from allstep.train.config.validate_keys import validated
from allstep.train.folder.run_lock import LOCK

CONFIG, RECORD = "config.yaml", "run.jsonl"
_MAX_SHOWN = 4
"""Number of differing keys that an error message lists."""

MAY_CHANGE = (
    "log_every",
    "save.",
    "execution",
    "share_weights",
    "shares",
    "device",
    "data.folder",
    "data.workers",
    "data.strict",
    "data.budget",
)
"""Keys that may change when a run is resumed: they do not affect what it computes."""


@dataclass(frozen=True)
class Claimed:
    """A folder for a run: new, or with a run that is resumed or has ended."""

    path: Path
    resumes: bool = False
    """True if the folder holds a run, which is resumed."""
    has_ended: bool = False
    """True if the run in the folder has ended, so there is nothing to do."""
    is_new: bool = False
    """True if this claim wrote config.yaml."""
    overrides: tuple[str, ...] = ()
    """Changed keys of those that may change, as "key=value" on top of the folder's config.yaml."""

    def ended_message(self) -> str:
        """Return the message that the run has ended and there is nothing to do."""
        return f"{self.path}: this run has ended; view it with `allstep report {self.path}`"


def claim_folder(config: ResolvedConfig, out: Path | None, resume: bool = False) -> Claimed:
    """Return the folder of a run with the config in it, and seal it for this user.

    `out` is the folder (default: runs/<recipe>-<time>, or runs/<model>-on-<data>-<time> without a
    recipe). `resume` allows a folder that holds a run, which is resumed then. Raise ConfigError if
    the folder holds another run or cannot be written.

    The seal is justified, because `read_config` has checked that a model factory in the config is
    the user's own or trusted.
    """
    claimed = _claim(config, out, resume)
    if not claimed.has_ended:
        seal(claimed.path, config.model)
    return claimed


def _claim(config: ResolvedConfig, out: Path | None, resume: bool) -> Claimed:
    """Return the folder with the config in it; see `claim_folder`."""
    try:
        _check_outside_data(config, Path("runs") if out is None else out)
        folder = _new_folder(config.title) if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        if holds_run(folder) and (resume or has_trained(folder)):
            return _claim_run(config, folder, resume)
        file = folder / CONFIG
        is_new = not file.exists() and create_file(file, config.to_yaml().encode())
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{error.filename or out}: cannot be written: {reason}") from error
    complaint = f"{file}: exists already with other values", "move it away"
    return Claimed(folder, is_new=is_new, overrides=_overrides(config, folder, *complaint))


def _check_outside_data(config: ResolvedConfig, folder: Path) -> None:
    """Raise ConfigError if `folder` is inside class folders of the data.

    A run folder there would be one more class, for the next run and when this run is resumed.
    """
    if holds_run(folder):
        return
    for key in ("train", "validation", "test"):
        place = getattr(config.data, key)
        if not isinstance(place, str) or not folder.resolve().is_relative_to(Path(place).resolve()):
            continue
        if holds_class_folders(Path(place)):
            raise ConfigError(
                f"run folder {folder} is inside data.{key}={place}, where every subfolder is a"
                " class; choose another --out"
            )


def abandon(claimed: Claimed) -> None:
    """Undo a claim after an error, if no run was started in the folder.

    After the user has corrected the error, the next claim finds the folder in its former state.
    """
    folder = claimed.path
    if claimed.is_new and not holds_run(folder):
        with contextlib.suppress(OSError):
            for name in (CONFIG, RECORD, LOCK, SEAL):
                (folder / name).unlink(missing_ok=True)
            # Fails, as it should, if there is anything else in the folder.
            folder.rmdir()


def holds_run(folder: Path) -> bool:
    """Return whether `folder` has a run that could be resumed, or overwritten by a new one."""
    record = folder / RECORD
    try:
        if record.is_file() and record.stat().st_size:
            return True
        return any(_checkpoints(folder))
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: cannot be read: {error.strerror or error}"
        ) from error


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Yield what might be a checkpoint, and must not be overwritten: names of any digits."""
    checkpoints = folder / "checkpoints"
    if checkpoints.is_dir():
        yield from (path for path in checkpoints.iterdir() if path.name.isdigit())


def has_trained(folder: Path) -> bool:
    """Return whether the run in `folder` has recorded anything beyond its start, or saved.

    A record without a start, such as a damaged one, counts as trained.
    """
    if any(_checkpoints(folder)):
        return True
    found = runlog.read(folder / RECORD)
    is_begun = bool(found.starts)
    return not is_begun or any(
        (found.steps, found.evals, found.checkpoints, found.ends, found.syncs)
    )


def has_ended(folder: Path) -> bool:
    """Return whether `folder` has a run that ended with a test score."""
    try:
        end = runlog.read(folder / RECORD).end
        return (
            end is not None
            and isinstance(end.get("test"), Mapping)
            and type(end.get("samples", 0)) is int
        )
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{folder / RECORD}: cannot be read: {error.strerror or error}; move it away"
        ) from error


def expect_run(folder: Path) -> None:
    """Raise ConfigError if `folder` has no run to resume."""
    if not holds_run(folder):
        raise ConfigError(
            f"{folder}: holds no run to resume, neither {RECORD} nor a checkpoint; --out"
            f" {folder} --resume auto would start one"
        )


def _claim_run(config: ResolvedConfig, folder: Path, resume: bool) -> Claimed:
    """Return the claim of a folder that holds a run; raise ConfigError if it cannot resume."""
    if not resume:
        raise ConfigError(
            f"{folder}: already holds a run; resume it with --resume auto, or choose another folder"
            " with --out"
        )
    if not (folder / CONFIG).exists():
        raise ConfigError(
            f"{folder}: holds a run, but its {CONFIG} is missing; restore it (`config` in the first"
            f" line of {RECORD} has the same values), or choose another folder with --out"
        )
    complaint = f"{folder}: holds a run with another config"
    remedy = f"resume it unchanged (--resume {folder})"
    overrides = _overrides(config, folder, complaint, remedy)
    return Claimed(folder, resumes=True, has_ended=has_ended(folder), overrides=overrides)


def _overrides(
    config: ResolvedConfig, folder: Path, complaint: str, remedy: str
) -> tuple[str, ...]:
    """Return the keys of `config` that differ from the folder's config.yaml, as "key=value".

    Raise ConfigError with `complaint`, the differences and `remedy` if a key differs that may not
    change.
    """
    found = read_layers(str(folder / CONFIG), ())[0]
    # Runs of earlier versions have no such section, and trained with its defaults.
    usual = SyncConfig().model_dump(mode="json")
    before = {**found, "sync": {**usual, **found.get("sync", {})}}
    now = as_begun(config, folder).model_dump(mode="json")
    if changed := list(changes(before, now)):
        more = f"; and {len(changed) - _MAX_SHOWN} more" if len(changed) > _MAX_SHOWN else ""
        shown = "; ".join(changed[:_MAX_SHOWN])
        raise ConfigError(
            f"{complaint}: {shown}{more}; {remedy}, or choose another folder with --out"
        )
    allowed = ((key, value) for key, _, value in differences(before, now) if _may_change(key))
    return tuple(f"{key}={json.dumps(value)}" for key, value in allowed)


def as_begun(config: ResolvedConfig, folder: Path) -> ResolvedConfig:
    """Return `config` with the precision of the run in `folder` instead of `precision: auto`.

    So the command that started a run resumes it, also if its precision was fixed: recipes of
    earlier versions did not have auto.
    """
    if config.precision != "auto":
        return config
    begun = read_layers(str(folder / CONFIG), ())[0].get("precision", config.precision)
    checked = validated({**config.model_dump(), "precision": begun})
    return config.model_copy(update={"precision": checked.precision})


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Return one line per differing key, of the keys that decide what a run computes."""
    return (
        f"{key} was {was}, is {is_now} now"
        for key, was, is_now in differences(before, now)
        if not _may_change(key)
    )


def _may_change(key: str) -> bool:
    """Return whether a key may change when a run is resumed."""
    return key.startswith(MAY_CHANGE)


def _new_folder(title: str) -> Path:
    """Create and return a folder in `runs`; runs of the same second get numbers."""
    name = re.sub(r"[^\w.]+", "-", title)
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
