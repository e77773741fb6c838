"""Starts a calibration on the workers of this host, or of several, and reads its result.

The workers are those of `allstep run`, so they form the world, use the threads and the links that
the workers of a run would.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from allstep.errors import AllstepError, ConfigError
from allstep.plan.calibration import Calibration
from allstep.plan.calibration_file import from_plain
from allstep.process.python import run_module
from allstep.world import LAUNCHERS

MARK = "allstep-calibration "
EFFORT = 1.0
"""Factor on the seconds that each phase measures for."""
_SECONDS = 600.0


def calibrate(
    source: str,
    overrides: Sequence[str],
    data: Path | None = None,
    num_workers: int = 1,
    hosts: str | None = None,
) -> Calibration:
    """Measure with `num_workers` workers of this host, or on `hosts` (h1:2,h2:2).

    Raise ConfigError if the run could not start, AllstepError if a worker failed.
    """
    asked = {
        "source": source,
        "overrides": list(overrides),
        "data": None if data is None else str(data.absolute()),
        "effort": EFFORT,
    }
    where = ["-H", hosts] if hosts else ["-np", str(num_workers)]
    rank = run_module("allstep.study.calibration.rank", json.dumps(asked))
    command = run_module("allstep", "run", *where, "--grace", "2", "--", *rank)
    try:
        ended = subprocess.run(
            command,
            env=_outside(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise AllstepError(f"the calibration did not end within {_SECONDS:g} s") from None
    if ended.returncode:
        raise _error(ended)
    parts = [line.partition(MARK)[2] for line in ended.stdout.splitlines() if MARK in line]
    text = "".join(part.rstrip().removesuffix(".") for part in parts)
    try:
        return from_plain(json.loads(text), "the calibration")
    except ValueError:
        raise AllstepError(
            "the calibration ended without a result; look for output of the model's code"
        ) from None


def _error(ended: subprocess.CompletedProcess[str]) -> AllstepError:
    """Return the error of the workers: theirs if it is the user's, else all of it."""
    lines = [each.strip() for each in ended.stderr.splitlines() if each.strip()]
    ours = [each.partition("allstep: ")[2] for each in lines if "allstep: " in each]
    if ended.returncode == 2 and ours:
        return ConfigError(ours[0])
    return AllstepError(
        "the calibration failed: " + "\n".join(lines[-12:] or ["the workers printed nothing"])
    )


def _outside() -> dict[str, str]:
    """Return our environment without the variables of launchers around this process."""
    foreign = {name for launcher in LAUNCHERS.values() for names in launcher[1:] for name in names}
    return {name: value for name, value in os.environ.items() if name not in foreign}
