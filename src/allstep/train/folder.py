"""The run folder: where a run leaves what it did, and where it is taken up again.

```
DIR/config.yaml      what the run is: training from this file repeats it
DIR/run.jsonl        how it went
DIR/checkpoints/     where it can go on
```

A folder that holds a run is never written over: either the run goes on (`--resume auto`), or the new one gets another name.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from allstep import runlog
from allstep.errors import ConfigError
from allstep.train.config import RunConfig

MAY_CHANGE = (
    "log_every",
    "save.",
    "layout",
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


def claim_folder(config: RunConfig, out: Path | None, resume: bool = False) -> Claimed:
    """The folder `out`, else a new `runs/<recipe>-<time>`, with the config in it. resume: a run that is there goes on."""
    try:
        folder = _new_folder(config.recipe) if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "run.jsonl").exists():
            return _taken_up(config, folder, resume)
        (folder / "config.yaml").write_text(config.to_yaml())
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from error
    return Claimed(folder)


def _taken_up(config: RunConfig, folder: Path, resume: bool) -> Claimed:
    if not resume:
        raise ConfigError(
            f"{folder}: already holds a run; go on with it by --resume auto, or give another folder with --out"
        )
    if changed := list(changes(yaml.safe_load((folder / "config.yaml").read_text()), config.model_dump(mode="json"))):
        raise ConfigError(
            f"{folder}: the run there is another one: {'; '.join(changed)}; go on with it as it was (--resume {folder}), or give another "
            "folder with --out"
        )
    return Claimed(folder, goes_on=True, has_ended=runlog.read(folder / "run.jsonl").end is not None)


def changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """In which keys two configs differ, of those that decide what a run computes."""
    for key in dict.fromkeys([*before, *now]):
        name, was, is_now = f"{prefix}{key}", before.get(key), now.get(key)
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            yield from changes(was, is_now, f"{name}.")
        elif was != is_now and not name.startswith(MAY_CHANGE):
            yield f"{name} was {was}, is {is_now} now"


def _new_folder(recipe: str) -> Path:
    """Runs that start in the same second get numbers."""
    stem = Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
