"""What a study leaves behind in its folder:

`table.md` for people, `table.json` for programs, `study.png`.
"""

import json
import platform
import re
from pathlib import Path
from typing import Any, Protocol

from allstep._version import __version__
from allstep.machine import allowed_cores
from allstep.study.folder import StudyFolder, write_whole
from allstep.study.trial import Results

_OURS = re.compile(r"(?:\[\d+\] )?allstep: ")  # with the rank before it


class Findings(Protocol):
    """A study's tables."""

    def markdown(self) -> str: ...
    def as_json(self) -> dict[str, Any]: ...
    def draw(self, file: Path) -> None: ...


def write_findings(folder: StudyFolder, findings: Findings, results: Results, command: str) -> str:
    """Writes all three; the table.

    The same results give the same files, however often the study was cut.
    """
    page = "\n".join([findings.markdown(), *_failures(results), f"Made by `{command}`.", ""])
    machine = {
        "system": platform.platform(),
        "cores": allowed_cores(),
        "python": platform.python_version(),
    }
    whole = {"version": __version__, "command": command, "machine": machine, **findings.as_json()}
    write_whole(folder.path / "table.md", page)
    write_whole(folder.path / "table.json", json.dumps(whole, indent=2) + "\n")
    findings.draw(folder.path / "study.png")
    return page


def _failures(results: Results) -> list[str]:
    """A line for each trial that failed: its error, or its last words."""
    failed = [outcome for outcome in results.values() if outcome.status == "failed"]
    if not failed:
        return []
    return [
        "## Failed",
        "",
        *(f"- {outcome.trial.name}: {_error(outcome.reason)}" for outcome in failed),
        "",
    ]


def _error(reason: str) -> str:
    """Our own errors may go on for several lines, of which the first says what happened."""
    lines = reason.splitlines()
    ours = [_OURS.sub("", line, count=1) for line in lines if _OURS.match(line)]
    return ours[-1] if ours else lines[-1]
