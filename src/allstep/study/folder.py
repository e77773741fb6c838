"""The folder of a study.

```
DIR/
  study.json             arguments of the study, which a resumed study must repeat; the precision of
                         all runs, if the study chose it
  study.lock             held by the process that runs the study
  runs/<trial>/          the run folders: run.jsonl, config.yaml, ...
  output/<trial>.txt     output of a trial
  output/<trial>.lock    held while a process of the trial lives
  output/<trial>.digest  digest of the settings with which the trial was started
  ended/<trial>.json     status and reason of a trial that was stopped or failed
  table.md, ...          results of the study
```

The state of a trial is read only from these files: an `end` line in its run record (done), a note
in `ended/` (stopped or failed), or neither (interrupted, or never started).
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from allstep import runlog
from allstep._version import __version__
from allstep.errors import ConfigError
from allstep.files.atomic import replace_file
from allstep.files.bounded import read_json, read_regular
from allstep.files.lock import LockTaken, locked
from allstep.runlog import RunRecord
from allstep.study.study import Study
from allstep.study.trial import Outcome, Status, Trial

_TAIL_LINES = 12
_TAIL_BYTES = 4000


class StudyFolder:
    """The folder of a study at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @contextmanager
    def held(self, study: Study) -> Iterator[None]:
        """Lock the folder; raise ConfigError if it is in use or has another study."""
        with ExitStack() as held:
            self._take(held)
            self._agree(study)
            yield

    def _take(self, held: ExitStack) -> None:
        try:
            for part in ("runs", "output", "ended"):
                (self.path / part).mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(self.path / "study.lock"))
        except LockTaken:
            raise ConfigError(
                f"{self.path}: another process runs a study here; wait for its end, or give another"
                " folder with --out"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{error.filename or self.path}: cannot be written: {error.strerror or error}; give"
                " another folder with --out"
            ) from error

    def _agree(self, study: Study) -> None:
        """Write study.json; raise ConfigError if the folder has a study with other arguments."""
        file = self.path / "study.json"
        arguments = json.loads(json.dumps(dict(study.arguments)))
        if file.exists():
            problems = list(_differences(_arguments(file), arguments, study.growing))
            if problems:
                raise ConfigError(
                    f"{self.path} holds another study: {'; '.join(problems)}; give the same"
                    " arguments, or another folder with --out"
                )
        kept = {} if study.precision is None else {"precision": study.precision}
        content = {"version": __version__, "arguments": arguments, **kept}
        write_whole(file, json.dumps(content, indent=2) + "\n")

    def precision(self) -> str | None:
        """Return the precision of all runs of the study in this folder; None if there is none yet.

        Folders of older versions have it only in the configs of their runs.
        """
        file = self.path / "study.json"
        if not file.exists():
            return None
        _arguments(file)
        recorded = _description(file).get("precision")
        records = (
            runlog.read(each)
            for each in sorted(self.path.glob("runs/*/run.jsonl"))
            if recorded is None and each.is_file()
        )
        return recorded or next((found for each in records if (found := _precision_of(each))), None)

    def run(self, trial: Trial) -> Path:
        """Return the run folder of `trial`."""
        return self.path / "runs" / trial.name

    def output(self, trial: Trial) -> Path:
        """Return the file with the output of `trial`."""
        return self.path / "output" / f"{trial.name}.txt"

    def lock(self, trial: Trial) -> Path:
        """Return the file that the processes of `trial` keep locked."""
        return self.path / "output" / f"{trial.name}.lock"

    def _note(self, trial: Trial) -> Path:
        return self.path / "ended" / f"{trial.name}.json"

    def _digest(self, trial: Trial) -> Path:
        return self.path / "output" / f"{trial.name}.digest"

    def _check_settings(self, trial: Trial) -> None:
        """Raise ConfigError if the run of this name was started with other settings."""
        file = self._digest(trial)
        if trial.settings and file.exists() and _read_text(file) != trial.settings:
            raise ConfigError(
                f"{self.run(trial)}: was started with other settings than now: the recipe or"
                " allstep has changed since; give another folder with --out, or remove that run to"
                " run it again"
            )

    def outcome(self, trial: Trial) -> Outcome | None:
        """Return how `trial` ended; None if it has not ended."""
        self._check_settings(trial)
        note, record = self._note(trial), self.record(trial)
        if note.exists():
            status, reason = _read_note(note)
            return Outcome(trial, status, record, reason)
        return Outcome(trial, "done", record) if record.end is not None else None

    def record(self, trial: Trial) -> RunRecord:
        """Return the run record of `trial` as written so far; an empty one if there is no file."""
        file = self.run(trial) / "run.jsonl"
        try:
            return runlog.read(file)
        except FileNotFoundError:
            return RunRecord()
        except OSError as error:
            raise ConfigError(
                f"{file}: cannot be read: {error.strerror or error}; move that run folder elsewhere"
            ) from error

    def write_note(self, outcome: Outcome) -> None:
        """Write the note of a trial that was stopped or failed."""
        note = {"status": outcome.status, "reason": outcome.reason}
        write_whole(self._note(outcome.trial), json.dumps(note, indent=2) + "\n")

    def forget_failures(self) -> None:
        """Remove the notes of failed trials, so that they are run again."""
        for note in (self.path / "ended").glob("*.json"):
            if _read_note(note)[0] == "failed":
                note.unlink()

    def prepare(self, trial: Trial) -> bool:
        """Return whether `trial` can resume an interrupted run; if not, remove its files."""
        has_started = (self.run(trial) / "run.jsonl").exists()
        if has_started and trial.resume:
            return True
        if self.run(trial).exists():
            shutil.rmtree(self.run(trial))
        self.output(trial).unlink(missing_ok=True)
        write_whole(self._digest(trial), trial.settings + "\n")
        return False

    def tail(self, trial: Trial) -> str:
        """Return the last lines of the output of `trial`."""
        try:
            with self.output(trial).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(
            [line.rstrip() for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
        )


def write_whole(file: Path, content: str | bytes) -> None:
    """Write `content` to `file`, whole or not at all; raise ConfigError if that is impossible."""
    try:
        replace_file(file, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"{file}: cannot be written: {reason}; remove the existing file, or give another --out"
        ) from error


def _precision_of(record: RunRecord) -> str | None:
    config = record.starts[0].get("config") if record.starts else None
    found = config.get("precision") if isinstance(config, Mapping) else None
    return None if found in (None, "auto") else str(found)


def _arguments(file: Path) -> Mapping[str, Any]:
    found = _description(file)["arguments"]
    assert isinstance(found, dict)
    return found


def _description(file: Path) -> Mapping[str, Any]:
    """Return the content of study.json; raise ConfigError if it is not a study's description."""
    found = _read_json(file, "the description of a study; give another folder with --out")
    arguments, precision = found.get("arguments"), found.get("precision")
    if not isinstance(arguments, dict) or not isinstance(precision, str | None):
        raise ConfigError(
            f"{file}: is not the description of a study; give another folder with --out"
        )
    return found


def _read_note(file: Path) -> tuple[Status, str]:
    """Return status and reason from the note of a trial that was stopped or failed."""
    expected = "a note on how a run ended; remove it, and that run is tried again"
    found = _read_json(file, expected)
    status, reason = found.get("status"), found.get("reason")
    if status not in ("done", "stopped", "failed") or not isinstance(reason, str):
        raise ConfigError(f"{file}: is not {expected}")
    return status, reason


def _read_json(file: Path, expected: str) -> Mapping[str, Any]:
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{file}: is not {expected} ({why})") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{file}: is not {expected} (expected keys and values, found {type(found).__name__})"
        )
    return found


def _read_text(file: Path) -> str:
    """Return the text of `file`, or "" (which equals no digest) if it cannot be read."""
    try:
        return read_regular(file, 1024).decode(errors="replace").strip()
    except OSError:
        return ""


def _differences(
    was: Mapping[str, Any], now: Mapping[str, Any], growing: frozenset[str]
) -> Iterator[str]:
    for key in dict.fromkeys([*was, *now]):
        if (
            key in was
            and key in now
            and (was[key] == now[key] or (key in growing and _grew(was[key], now[key])))
        ):
            continue
        yield f"{key} was {_shown(was.get(key))}, now {_shown(now.get(key))}"


def _grew(was: Any, now: Any) -> bool:
    """Return whether `now` has all entries of `was`, with the same or larger numbers."""
    if isinstance(was, dict) and isinstance(now, dict):
        return all(
            key in now and (was[key] == now[key] or _is_larger(was[key], now[key])) for key in was
        )
    if isinstance(was, list) and isinstance(now, list):
        return all(each in now for each in was)
    return _is_larger(was, now)


def _is_larger(was: Any, now: Any) -> bool:
    return isinstance(was, int) and isinstance(now, int) and was <= now


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)
