"""The results that a study writes into its folder.

`table.md` is for readers, `table.json` for programs, `study.png` has the plots.
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

# the prefix of allstep's own errors, possibly after the rank
_OURS = re.compile(r"(?:\[\d+\] )?allstep: ")


class Findings(Protocol):
    """The tables and plots of a study."""

    def markdown(self) -> str:
        """Return the content of `table.md`."""

    def as_json(self) -> dict[str, Any]:
        """Return the study's keys of `table.json`."""

    def draw(self, file: Path) -> None:
        """Write the plots as PNG to `file`."""


def write_findings(folder: StudyFolder, findings: Findings, results: Results, command: str) -> str:
    """Write the three files and return the content of `table.md`.

    `command` is the command line that made them. The same results give the same files, however
    often the study was interrupted.
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
    """Return a Markdown section with the error, or last output line, of each failed trial."""
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
    """Return the first line of allstep's last error, or the last line if there is no such error.

    An error of allstep may have several lines; the first describes what happened.
    """
    lines = reason.splitlines()
    ours = [_OURS.sub("", line, count=1) for line in lines if _OURS.match(line)]
    return ours[-1] if ours else lines[-1]
