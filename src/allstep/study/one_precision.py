"""One precision for all runs of a study, so that they differ in nothing but what the study varies.

```
the config names one              that one
study.json has one                that one: a resumed study keeps it, on any machine
CPU flags                         read here, without torch
a GPU, or a CPU without flags     as a run would settle it, in a child process (`train.settle_alone`)
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

_SECONDS = 600.0  # for the child, which opens the data and makes a few steps
_REMEDY = "set precision=float32 or precision=bfloat16"


@dataclass(frozen=True)
class OnePrecision:
    """A precision, and the reason for it in one line."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"precision {self.name} for all runs of the study: {self.why}"


def one_precision(config: RunConfig, folder: StudyFolder) -> OnePrecision | None:
    """Settle the precision of the study in `folder`; None where `config` names one."""
    if config.precision != "auto":
        return None
    if kept := folder.precision():
        return OnePrecision(kept, "kept from the start of the study")
    return _by_flags(config) or settled_apart(config)


def precision_words(name: str | None) -> tuple[str, ...]:
    """The key=value for each run."""
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
    """Settle it as a run of `config` with one worker would, in a child: this process has no torch.

    run: starts it and waits for its end, as `subprocess.run`.
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
