"""Whether a calibration fits what is asked: differences of model, batch and machine."""

import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from allstep.errors import ConfigError
from allstep.machine import allowed_cores
from allstep.plan.calibration import Calibration
from allstep.train.config.run_config import RunConfig


def check_same_run(
    calibration: Calibration,
    config: RunConfig,
    where: str,
    batch_is_given: bool,
    advice: str = "give that of this run, or omit --from to calibrate",
) -> None:
    """Raise ConfigError if the calibration is of another model, data or batch than the config.

    batch_is_given: the batch of the plan is an option, so that of the recipe does not matter.
    advice: the next step, for the error.
    """
    wanted = {
        "model": config.model.name,
        "options": json.dumps(dict(config.model.options), sort_keys=True, default=str),
        "optimizer": config.optimizer.name,
    }
    if config.precision != "auto":
        wanted["precision"] = config.precision
    # A config without a batch gets one that fits its data, as in the calibration.
    if not batch_is_given and (config.batch or config.batch_per_worker):
        wanted |= {
            "batch": config.batch or 0,  # type: ignore[dict-item]
            "batch_per_worker": config.batch_per_worker or 0,  # type: ignore[dict-item]
        }
    _check(calibration.facts, wanted, where, advice)


def cpu_name() -> str:
    """Return the name of the processor, or the architecture if the system has no name for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def check_same_machine(calibration: Calibration, where: str) -> None:
    """Raise ConfigError if the calibration was not made on a machine like this one."""
    _check(
        calibration.facts,
        {"cpu": cpu_name(), "cores": allowed_cores()},
        where,
        f"--from {where} plans for that machine, --calibrate measures this one",
    )


def _check(facts: Mapping[str, Any], wanted: Mapping[str, Any], where: str, advice: str) -> None:
    differences = list(_differences(facts, wanted))
    if differences:
        raise ConfigError(f"{where}: a calibration with {'; '.join(differences)}: {advice}")


def _differences(facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for key, value in wanted.items():
        if key in facts and facts[key] != value:
            yield f"{key} {facts[key]}, expected {value}"
