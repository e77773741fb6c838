"""Texts of a question as values: lists of workers, speeds of one worker, what-ifs.

```
1,2,4,...,4096        doubling;  2,4,6,...,16 adds
219@64, 195@32        images/s of one worker at 64 and at 32 samples
slow=3:1.5,link=2x    worker 3 takes 1.5 times as long, and the link has twice the rate
```
"""

import re
from dataclasses import replace
from math import inf, isfinite
from typing import NamedTuple

from allstep.errors import ConfigError, did_you_mean
from allstep.plan.prediction import Question
from allstep.plan.simulator import ALGORITHMS
from allstep.plan.transports import read_link

MOST_WORKERS = 1_000_000
_MOST_ROWS = 200
_ELLIPSIS = "..."
_ALONE = re.compile(r"(?P<speed>[0-9]+(?:\.[0-9]+)?)(?:@(?P<batch>[0-9]{1,9}))?")
_FACTOR = re.compile(r"([0-9]+(?:\.[0-9]+)?)x?")
ELEMENTS = {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5}
"""Bytes sent for each byte of a float32 gradient."""


class Alone(NamedTuple):
    """The speed of one worker in samples/s, at a number of samples per step if that is known."""

    speed: float
    batch: int | None


def read_workers(text: str) -> list[int]:
    """Return the numbers of workers in a rising list; raise ConfigError for any other text."""
    parts = [each.strip() for each in text.split(",")]
    found: list[int] = []
    for place, part in enumerate(parts):
        if part == _ELLIPSIS:
            if len(found) < 2 or place != len(parts) - 2:
                raise _not_rising(text)
            found += _between(found, _number(parts[-1], text), text)
        else:
            found.append(_number(part, text))
    if sorted(set(found)) != found or len(found) > _MOST_ROWS:
        raise _not_rising(text)
    return found


def _between(found: list[int], last: int, text: str) -> list[int]:
    """Return the numbers that three dots replace, without `last`."""
    before, now = found[-2:]
    steps, value = [], now
    doubles = now % before == 0 and (len(found) < 3 or now * found[-3] == before * before)
    if doubles and now > before:
        while (value := value * (now // before)) < last:
            steps.append(value)
        if value == last:
            return steps
    steps, value = [], now
    while now > before and len(steps) <= _MOST_ROWS and (value := value + now - before) < last:
        steps.append(value)
    if value != last:
        raise _not_rising(text)
    return steps


def _number(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= MOST_WORKERS:
        raise _not_rising(whole)
    return int(text)


def _not_rising(text: str) -> ConfigError:
    return ConfigError(
        f"--workers {text[:80]!r}: expected numbers of workers in rising order, at most"
        f" {_MOST_ROWS}, such as 1,2,4,8 or 1,2,4,...,4096"
    )


def read_alone(text: str) -> list[Alone]:
    """Return the speeds of one worker; raise ConfigError for a text that has none."""
    found = []
    for part in text.split(","):
        match = _ALONE.fullmatch(part.strip())
        if match is None or not 0 < float(match["speed"]) < inf:
            raise ConfigError(
                f"--alone {text[:80]!r}: expected images/s, with the batch it was measured at:"
                " 219@64, or at two batches 195@32,219@64"
            )
        batch = match["batch"] and int(match["batch"])
        if batch == 0:
            raise ConfigError(f"--alone {text[:80]!r}: expected a batch above 0")
        found.append(Alone(float(match["speed"]), batch or None))
    batches = [each.batch for each in found]
    if len(found) > 1 and (None in batches or len(set(batches)) < len(batches)):
        raise ConfigError(f"--alone {text[:80]!r}: expected different batches: 195@32,219@64")
    return sorted(found, key=lambda each: each.batch or 0)


def with_change(question: Question, text: str) -> Question:
    """Return the question with the changes of a text such as "slow=3:1.5,link=2x"."""
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key not in _CHANGES:
            raise ConfigError(
                f"--what-if {part[:60]!r}: expected NAME=VALUE with one of"
                f" {', '.join(_CHANGES)}; {did_you_mean(key, _CHANGES)}"
            )
        question = _CHANGES[key](question, value, part)
    return question


def _link(question: Question, value: str, part: str) -> Question:
    if value.endswith("x"):
        return replace(question, link_rate=_factor(value, part))
    return replace(question, link=read_link(value))


def _latency(question: Question, value: str, part: str) -> Question:
    return replace(question, latency=_factor(value, part))


def _gradients(question: Question, value: str, part: str) -> Question:
    if value not in ELEMENTS:
        raise _wrong(part, f"one of {', '.join(ELEMENTS)}")
    return replace(question, gradients=ELEMENTS[value])


def _batch(question: Question, value: str, part: str) -> Question:
    factor = _factor(value, part)

    def changed(batch: int | None) -> int | None:
        if batch is None:
            return None
        return max(1, round(factor * batch if value.endswith("x") else factor))

    return replace(
        question,
        batch=changed(question.batch),
        batch_per_worker=changed(question.batch_per_worker),
    )


def _algorithm(question: Question, value: str, part: str) -> Question:
    if value not in ALGORITHMS:
        raise _wrong(part, f"one of {', '.join(ALGORITHMS)}")
    return replace(question, algorithm=value)


def _input(question: Question, value: str, part: str) -> Question:
    return replace(question, input=_factor(value, part))


def _slow(question: Question, value: str, part: str) -> Question:
    rank, colon, factor = value.rpartition(":")
    if colon and not (rank.isascii() and rank.isdigit() and len(rank) < 8):
        raise _wrong(part, "a worker and a factor, such as slow=3:1.5")
    found = _factor(factor, part)
    if found < 1:
        raise _wrong(part, "a factor of at least 1")
    return replace(question, slow=found, slow_rank=int(rank) if colon else 0)


_CHANGES = {
    "link": _link,
    "latency": _latency,
    "gradients": _gradients,
    "batch": _batch,
    "algorithm": _algorithm,
    "input": _input,
    "slow": _slow,
}


def _factor(text: str, part: str) -> float:
    match = _FACTOR.fullmatch(text)
    value = float(match[1]) if match is not None and len(text) < 20 else 0.0
    if not (1e-6 <= value <= 1e9 and isfinite(value)):
        raise _wrong(part, "a factor above 0, such as 2x")
    return value


def _wrong(part: str, expected: str) -> ConfigError:
    return ConfigError(f"--what-if {part[:60]!r}: expected {expected}")
