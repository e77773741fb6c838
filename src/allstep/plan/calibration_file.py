"""The calibration as a file: JSON with the measurements and the facts of the machine.

A file is checked when it is read, value by value: an error names the field, what was found and what
was expected.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any

from allstep.costs.speed import Speed
from allstep.errors import ConfigError
from allstep.files.bounded import read_json
from allstep.plan.calibration import Calibration, HostsTimes, HostTimes, StepTimes, Sums

KIND = "allstep calibration"
VERSION = 1
_MOST = 1e15


def to_json(calibration: Calibration) -> str:
    """Return the text of the file."""
    found: dict[str, Any] = {"kind": KIND, "version": VERSION, **asdict(calibration)}
    return json.dumps(_finite(found), indent=1) + "\n"


def _finite(value: Any) -> Any:
    """Return the value with infinite rates as None, which JSON has."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def read_calibration(file: Path) -> Calibration:
    """Return the calibration in a file; raise ConfigError if it has none."""
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{file}: expected a calibration of allstep plan, found {why}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ConfigError(f"{file}: is no calibration; allstep plan RECIPE writes one")
    if found.get("version") != VERSION:
        raise ConfigError(
            f"{file}: has version {found.get('version')!r:.40}, expected {VERSION}; calibrate again"
        )
    return from_plain(found, str(file))


def from_plain(found: Mapping[str, Any], where: str) -> Calibration:
    """Return the calibration of the values of a file; `where` is its name, for errors."""
    at = _Reader(where)
    nbytes = at.numbers(found, "nbytes")
    if not nbytes:
        raise at.error("nbytes: expected the bytes of at least one gradient, found none")
    steps = tuple(
        at.step(each, f"steps[{i}]", len(nbytes)) for i, each in enumerate(at.items(found, "steps"))
    )
    if not steps or any(a.batch >= b.batch for a, b in pairwise(steps)):
        raise at.error("steps: expected at least one batch size, in rising order")
    facts = found.get("facts", {})
    return Calibration(
        nbytes=nbytes,
        steps=steps,
        num_train=at.whole(found, "num_train"),
        host=at.host(found.get("host"), len(nbytes)),
        hosts=at.hosts(found.get("hosts")),
        shares_weights=found.get("shares_weights") is True,
        facts=facts if isinstance(facts, dict) else {},
    )


class _Reader:
    """Reads fields with their checks; `where` is the name of the file."""

    def __init__(self, where: str) -> None:
        self.where = where

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.where}: {text}; calibrate again")

    def number(self, found: Mapping[str, Any], name: str, low: float = 0.0) -> float:
        value: Any = found.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= float(value) < _MOST:
            raise self.error(f"{name}: expected a number from {low:g} on, found {value!r:.60}")
        return float(value)

    def whole(self, found: Mapping[str, Any], name: str) -> int:
        value = self.number(found, name, 1)
        if value != int(value):
            raise self.error(f"{name}: expected a whole number, found {value:g}")
        return int(value)

    def items(self, found: Mapping[str, Any], name: str) -> list[Any]:
        value = found.get(name)
        if not isinstance(value, list):
            raise self.error(f"{name}: expected a list, found {value!r:.60}")
        return value

    def numbers(self, found: Mapping[str, Any], name: str) -> tuple[float, ...]:
        values = self.items(found, name)
        return tuple(self.number({f"{name}[{i}]": v}, f"{name}[{i}]") for i, v in enumerate(values))

    def section(self, found: Any, name: str) -> Mapping[str, Any]:
        if not isinstance(found, dict):
            raise self.error(f"{name}: expected keys and values, found {found!r:.60}")
        return found

    def step(self, found: Any, name: str, num_gradients: int) -> StepTimes:
        each = self.section(found, name)
        ready = self.numbers(each, "ready")
        if len(ready) != num_gradients:
            raise self.error(
                f"{name}.ready: expected a time for each of {num_gradients} gradients, found"
                f" {len(ready)}"
            )
        return StepTimes(
            batch=self.whole(each, "batch"),
            forward=self.number(each, "forward", 1e-9),
            backward=self.number(each, "backward", 1e-9),
            ready=ready,
            update=self.number(each, "update"),
            input=self.number(each, "input"),
            jitter=self.number(each, "jitter"),
        )

    def sums(self, found: Mapping[str, Any]) -> Sums:
        pairs = self.items(found, "sums")
        if not all(isinstance(each, list) and len(each) == 2 for each in pairs):
            raise self.error("sums: expected pairs of bytes and seconds")
        read = [self.numbers({"sums": each}, "sums") for each in pairs]
        if any(value <= 0 for each in read for value in each):
            raise self.error("sums: expected bytes and seconds above 0")
        return tuple((each[0], each[1]) for each in read)

    def together(self, found: Mapping[str, Any]) -> float | None:
        return None if found.get("together") is None else self.number(found, "together", 1e-9)

    def host(self, found: Any, num_gradients: int) -> HostTimes | None:
        if found is None:
            return None
        each = self.section(found, "host")
        return HostTimes(
            workers=self.whole(each, "workers"),
            independent=self.step(each.get("independent"), "host.independent", num_gradients),
            by_rank=self.numbers(each, "by_rank"),
            sums=self.sums(each),
            together=self.together(each),
        )

    def hosts(self, found: Any) -> HostsTimes | None:
        if found is None:
            return None
        each = self.section(found, "hosts")
        link = self.section(each.get("link"), "hosts.link")
        return HostsTimes(
            hosts=self.whole(each, "hosts"),
            per_host=self.whole(each, "per_host"),
            link=Speed(
                self.number(link, "latency"),
                self.number(link, "bandwidth", 1.0),
                inf if link.get("adding") is None else self.number(link, "adding", 1.0),
            ),
            batch=self.whole(each, "batch"),
            sums=self.sums(each),
            together=self.together(each),
        )
