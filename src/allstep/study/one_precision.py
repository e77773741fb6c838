"""One precision for all runs of a study, so that they differ only in what the study varies.

```
the config sets a precision       use it
study.json has a precision        use it: a resumed study keeps its precision on any machine
CPU with known flags              choose by the flags, without torch
GPU, or CPU without flags         choose as a run would, in a child process (`settle_precision`)
```
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from allstep.errors import ConfigError
from allstep.machine import cpu_bfloat16, cpu_flags
from allstep.process.python import run_module
from allstep.study.folder import StudyFolder
from allstep.train.config.num_workers import count_gpus
from allstep.train.config.run_config import RunConfig

# timeout of the child, which opens the data and runs a few steps
_SECONDS = 600.0
_REMEDY = "set precision=float32 or precision=bfloat16"


@dataclass(frozen=True)
class OnePrecision:
    """A precision and a one-line reason for it."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"precision {self.name} for all runs of the study: {self.why}"


def one_precision(config: RunConfig, folder: StudyFolder) -> OnePrecision | None:
    """Return the precision of the study in `folder`; None if `config` sets one itself."""
    if config.precision != "auto":
        return None
    if kept := folder.precision():
        return OnePrecision(kept, "kept from the start of the study")
    return _by_flags(config) or settled_apart(config)


def precision_override(name: str | None) -> tuple[str, ...]:
    """Return the key=value argument that sets this precision in a run; empty for None."""
    return () if name is None else (f"precision={name}",)


def _by_flags(config: RunConfig) -> OnePrecision | None:
    if config.device != "cpu" and count_gpus():
        return None
    found = cpu_bfloat16(cpu_flags())
    if found.native is None:
        return None
    return OnePrecision("bfloat16" if found.native else "float32", found.why)


def settled_apart(
    config: RunConfig, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> OnePrecision:
    """Return the precision that a run of `config` with one worker would choose.

    A child process chooses it, because this one does not import torch. `run` starts the child and
    waits for its end, as `subprocess.run` does.
    """
    command = run_module("allstep.train.run.settle_precision")
    try:
        asked = config.model_dump_json()
        ended = run(command, input=asked, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"precision=auto: no answer after {_SECONDS:g} s of timing; {_REMEDY}"
        ) from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("allstep: ")
        raise ConfigError(f"precision=auto could not be settled: {last}; {_REMEDY}")
    answer = json.loads(ended.stdout.splitlines()[-1])
    return OnePrecision(answer["name"], answer["why"])
