"""The run folder: where a run leaves what it did. `DIR/config.yaml` is what it was, `DIR/run.jsonl` how it went."""

import time
from pathlib import Path

from allstep.errors import ConfigError
from allstep.train.config import RunConfig


def make_run_folder(config: RunConfig, out: Path | None) -> Path:
    """The folder `out`, else a new `runs/<recipe>-<time>`, with the config in it. One that holds a run is left alone."""
    try:
        folder = _new_folder(config.recipe) if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "run.jsonl").exists():
            raise ConfigError(f"{folder}: already holds a run; give another folder with --out")
        (folder / "config.yaml").write_text(config.to_yaml())
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from error
    return folder


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
