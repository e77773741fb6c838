"""The run folder: where a run leaves what it did, and where it is taken up again.

```
DIR/config.yaml      what the run is: training from this file repeats it
DIR/run.jsonl        how it went
DIR/checkpoints/     where it can go on
DIR/run.lock         locked by the process that trains it (`lock`)
DIR/run.seal         that this user trains a model of the user's own code here (`trust`)
```

A folder that holds a run is never written over: either the run goes on (`--resume auto`), or the
new one gets another name. A record or a checkpoint is enough to be a run. Nor is a config.yaml that
says something else: it may be the only copy of what a user wrote.
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
from allstep.train.config.read import read_layers
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.config.trust import SEAL, seal
from allstep.train.config.validate import validated
from allstep.train.folder.lock import LOCK

CONFIG, RECORD = "config.yaml", "run.jsonl"
_MOST_SHOWN = 4  # differences in a message

MAY_CHANGE = (
    "log_every",
    "save.",
    "execution",
    "share_weights",
    "device",
    "data.folder",
    "data.workers",
    "data.strict",
    "data.budget",
)
"""Keys in which a resumed run may differ from what it was: they do not decide what it computes."""


@dataclass(frozen=True)
class Claimed:
    """A folder for a run: a new one, or one that is taken up again, or has ended."""

    path: Path
    goes_on: bool = False
    has_ended: bool = False
    is_new: bool = False
    """The config.yaml there is of this claim."""
    words: tuple[str, ...] = ()
    """What is asked for now and was not then, of what may change: key=value, on top of the folder's
    config.yaml."""

    def farewell(self) -> str:
        """Why there is nothing to do in a run that has ended."""
        return f"{self.path}: this run has ended; look at it with `allstep report {self.path}`"


def claim_folder(config: ResolvedConfig, out: Path | None, resume: bool = False) -> Claimed:
    """The folder `out`, else a new one in `runs`, with the config in it. resume: a run that is
    there continues.

    A new one is called <recipe>-<time>, or without a recipe <model>-on-<data>-<time>.

    `read_config` has made sure that a factory in the config is the user's own or trusted, so the
    folder gets the user's seal.
    """
    claimed = _claimed(config, out, resume)
    if not claimed.has_ended:
        seal(claimed.path, config.model)
    return claimed


def _claimed(config: ResolvedConfig, out: Path | None, resume: bool) -> Claimed:
    try:
        _keep_out_of_data(config, Path("runs") if out is None else out)
        folder = _new_folder(config.title) if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        if holds_run(folder):
            return _taken_up(config, folder, resume)
        is_new = not (folder / CONFIG).exists() and create_file(
            folder / CONFIG, config.to_yaml().encode()
        )
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out}: cannot be written: {error.strerror or error}"
        ) from error
    complaint = f"{folder / CONFIG}: is there already and says something else", "move it away"
    return Claimed(folder, is_new=is_new, words=_words(config, folder, *complaint))


def _keep_out_of_data(config: ResolvedConfig, folder: Path) -> None:
    """Folders of images are classes: a run among them would be one more, for the next run and for
    its own resume."""
    if holds_run(folder):
        return
    for key in ("train", "validation", "test"):
        place = getattr(config.data, key)
        if not isinstance(place, str) or not folder.resolve().is_relative_to(Path(place).resolve()):
            continue
        if holds_class_folders(Path(place)):
            raise ConfigError(
                f"the run folder {folder} would lie in data.{key}={place}, whose folders are"
                " classes: give another one with --out"
            )


def abandon(claimed: Claimed) -> None:
    """Takes back a claim of which no run came, so that the next one, with the mistake mended, finds
    the folder as this one did."""
    folder = claimed.path
    if claimed.is_new and not holds_run(folder):
        with contextlib.suppress(OSError):
            for name in (CONFIG, RECORD, LOCK, SEAL):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()  # unless there is something else in it


def holds_run(folder: Path) -> bool:
    """Whether there is something that a new run would destroy, or an old one could go on from."""
    record, checkpoints = folder / RECORD, folder / "checkpoints"
    try:
        if record.is_file() and record.stat().st_size:
            return True
        # Odd digits count, too: what might be a checkpoint is not written over.
        return checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir())
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: cannot be read: {error.strerror or error}"
        ) from error


def has_ended(folder: Path) -> bool:
    """Whether the run in it, if there is one, has come to its end.

    An end without a test score is none.
    """
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
    """ConfigError where there is nothing to go on with."""
    if not holds_run(folder):
        raise ConfigError(
            f"{folder}: holds no run to go on with, neither {RECORD} nor a checkpoint; --out"
            f" {folder} --resume auto would begin one"
        )


def _taken_up(config: ResolvedConfig, folder: Path, resume: bool) -> Claimed:
    if not resume:
        raise ConfigError(
            f"{folder}: already holds a run; go on with it by --resume auto, or give another folder"
            " with --out"
        )
    if not (folder / CONFIG).exists():
        raise ConfigError(
            f"{folder}: holds a run, but {CONFIG} is gone, which says what it computes (so does"
            f" `config` in the first line of {RECORD}); put it back, or give another folder with"
            " --out"
        )
    words = _words(
        config,
        folder,
        f"{folder}: the run there is another one",
        f"go on with it as it was (--resume {folder})",
    )
    return Claimed(folder, goes_on=True, has_ended=has_ended(folder), words=words)


def _words(config: ResolvedConfig, folder: Path, complaint: str, remedy: str) -> tuple[str, ...]:
    """In what `config` differs from the folder's, if it may; else `complaint` with the differences
    and `remedy`."""
    before = read_layers(str(folder / CONFIG), ())[0]
    now = as_begun(config, folder).model_dump(mode="json")
    if changed := list(changes(before, now)):
        more = f"; and {len(changed) - _MOST_SHOWN} more" if len(changed) > _MOST_SHOWN else ""
        shown = "; ".join(changed[:_MOST_SHOWN])
        raise ConfigError(
            f"{complaint}: {shown}{more}; {remedy}, or give another folder with --out"
        )
    return tuple(
        f"{key}={json.dumps(value)}"
        for key, _, value in differences(before, now)
        if _may_change(key)
    )


def as_begun(config: ResolvedConfig, folder: Path) -> ResolvedConfig:
    """Replace `precision: auto` by what the run in `folder` was begun with.

    So a run with a fixed precision, such as one from before recipes said auto, is resumed by the
    command that began it.
    """
    if config.precision != "auto":
        return config
    begun = read_layers(str(folder / CONFIG), ())[0].get("precision", config.precision)
    checked = validated({**config.model_dump(), "precision": begun})
    return config.model_copy(update={"precision": checked.precision})


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """In which keys two configs differ, of those that decide what a run computes."""
    return (
        f"{key} was {was}, is {is_now} now"
        for key, was, is_now in differences(before, now)
        if not _may_change(key)
    )


def _may_change(key: str) -> bool:
    return key.startswith(MAY_CHANGE)


def _new_folder(title: str) -> Path:
    """Runs that start in the same second get numbers."""
    word = re.sub(r"[^\w.]+", "-", title)
    stem = Path("runs") / f"{word}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
