"""The text of a fault, `KIND[:VALUE]@WHERE`, and its value.

    kill@rank=1,step=50                  stop:2.5@rank=0,seconds=10
    slow:3@rank=1,step=50-90             random:kill,stop@every=15s,seed=3

`parse` and `str` are inverse to each other, up to the order of the places. Several faults are
separated by `;`, as in the environment variable ALLSTEP_FAULTS. All errors are `ConfigError`, one
line each. `kinds` has the table of what is allowed; this module has no other state.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from allstep.errors import ConfigError, cut, did_you_mean
from allstep.faults.kinds import (
    KINDS,
    PHASES,
    RANDOM,
    RANDOM_PLACES,
    SINGLE_PHASES,
    TRIGGERS,
    Kind,
    Value,
)

VARIABLE = "ALLSTEP_FAULTS"
"""The environment variable with the faults of a run, separated by `;`."""

_MAX_NUMBER = 2**63 - 1
_MAX_SECONDS = 10_000_000.0


@dataclass(frozen=True)
class Span:
    """The numbers from `first` to `last`, both included; without an end if `last` is None."""

    first: int
    last: int | None

    def __contains__(self, number: int) -> bool:
        return self.first <= number and (self.last is None or number <= self.last)

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}-{'' if self.last is None else self.last}"


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, the value of the kind, and where it occurs.

    rank: None for every rank. At most one of step, commit, op (collectives of the default group),
    seconds and sample is set. during: a phase, or None.
    """

    kind: str
    value: float | None = None
    rank: int | None = None
    step: Span | None = None
    commit: Span | None = None
    op: int | None = None
    seconds: float | None = None
    sample: int | None = None
    during: str | None = None

    def __str__(self) -> str:
        head = self.kind if self.value is None else f"{self.kind}:{_text(self.value)}"
        return head + _where(self, fields(self)[2:])

    @property
    def does(self) -> str:
        """Return what the victim does, for a report."""
        return KINDS[self.kind].does.format("" if self.value is None else _text(self.value))


@dataclass(frozen=True)
class RandomFaults:
    """Faults at random times over a whole run, the same for the same seed.

    choices: kinds with their values. every: mean seconds between two faults. rank: the only victim;
    None for any.
    """

    choices: tuple[Fault, ...]
    every: float
    seed: int = 0
    rank: int | None = None

    def __str__(self) -> str:
        head = f"{RANDOM}:{','.join(map(str, self.choices))}"
        return head + _where(self, fields(self)[1:])


Spec = Fault | RandomFaults


def _where(spec: Spec, places: Iterable[Any]) -> str:
    given = [(each.name, getattr(spec, each.name)) for each in places]
    parts = [f"{name}={_text(value)}" for name, value in given if value is not None]
    return f"@{','.join(parts)}" if parts else ""


def _text(value: Any) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)


# Parsing


def parse_all(text: str) -> list[Spec]:
    """Return the faults of a text in which `;` separates them."""
    return [parse(part) for part in text.split(";") if part.strip()]


def join(texts: Sequence[str]) -> str:
    """Return one text for ALLSTEP_FAULTS; the inverse of `parse_all`."""
    return ";".join(text.strip() for text in texts if text.strip())


def parse(text: str) -> Spec:
    """Return the fault of a text; raise ConfigError if it is wrong."""
    try:
        head, _, where = text.strip().partition("@")
        kind, colon, value = head.partition(":")
        places = _split(where)
        if kind == RANDOM:
            return _random(value, places)
        if kind not in KINDS:
            raise _Wrong(f"unknown kind {kind!r}; {did_you_mean(kind, [*KINDS, RANDOM])}")
        return _fault(kind, value if colon else None, places)
    except _Wrong as wrong:
        raise ConfigError(f"fault {cut(text.strip(), 100)!r}: {wrong}") from None


class _Wrong(Exception):
    """The reason why a text is no fault."""


def _split(where: str) -> dict[str, str]:
    """Return the places of a WHERE by name."""
    places: dict[str, str] = {}
    for part in where.split(",") if where else ():
        name, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise _Wrong(f"expected NAME=VALUE after @, found {part!r}; example: rank=1,step=50")
        if name in places:
            raise _Wrong(f"{name} is given twice")
        places[name] = value
    return places


def _fault(name: str, value: str | None, places: Mapping[str, str]) -> Fault:
    kind = KINDS[name]
    _check_places(name, kind.places, places)
    found: dict[str, Any] = {place: _READERS[place](text) for place, text in places.items()}
    fault = Fault(name, _value(name, kind, value), **found)
    _check_together(fault, places)
    return fault


def _value(name: str, kind: Kind, text: str | None) -> float | None:
    if kind.value is None:
        if text is not None:
            raise _Wrong(f"{name} has no value; remove {':' + text!r}")
        return None
    if not text:
        raise _Wrong(f"{name} needs a value: {name}:{kind.value.name}")
    return _bounded(kind.value, text)


def _bounded(value: Value, text: str) -> float:
    found = _number(text, int if value.whole else float)
    # Written so that nan is refused too.
    if found is None or not value.low <= found <= value.high:
        what = "whole number" if value.whole else "number"
        raise _Wrong(
            f"{value.name} must be a {what} from {value.low:g} to {value.high:g}, found {text!r}"
        )
    return found if value.whole else float(found)


def _number(text: str, of_type: type[int] | type[float]) -> float | None:
    # Python accepts underscores and spaces, which are mistakes here.
    if not text.isascii() or "_" in text or text != text.strip():
        return None
    try:
        return of_type(text)
    except ValueError:
        return None


def _check_places(name: str, allowed: Sequence[str], places: Mapping[str, str]) -> None:
    for place in places:
        if place in allowed:
            continue
        if place in _READERS or place in RANDOM_PLACES:
            raise _Wrong(f"{name} has no place {place}=; possible are {', '.join(allowed)}")
        raise _Wrong(f"unknown place {place!r}; {did_you_mean(place, allowed)}")


def _check_together(fault: Fault, places: Mapping[str, str]) -> None:
    triggers = [place for place in TRIGGERS if place in places]
    if len(triggers) > 1:
        raise _Wrong(f"{' and '.join(triggers)} exclude each other; give one of them")
    if fault.kind == "corrupt" and fault.sample is None:
        raise _Wrong("corrupt needs the number of a record: corrupt@sample=N")
    if fault.during in SINGLE_PHASES and triggers:
        raise _Wrong(f"during={fault.during} belongs to no {triggers[0]}; remove {triggers[0]}=")
    if fault.during is not None and set(triggers) - {"step", "sample"}:
        raise _Wrong(f"during={fault.during} is a phase of a step; remove {triggers[0]}=")


# The values of the places


def _count(text: str, low: int, name: str) -> int:
    found = _number(text, int)
    if found is None or not low <= found <= _MAX_NUMBER:
        raise _Wrong(f"{name} must be a whole number from {low}, found {text!r}")
    return int(found)


def _span(text: str, name: str) -> Span:
    first, dash, last = text.partition("-")
    span = Span(
        _count(first, 1, name), _count(last or first, 1, name) if last or not dash else None
    )
    if span.last is not None and span.last < span.first:
        raise _Wrong(f"{name}={text} ends before it begins; write {name}={last}-{first}")
    return span


def _seconds(text: str, low: float, name: str) -> float:
    found = _number(text.removesuffix("s"), float)
    if found is None or not low <= found <= _MAX_SECONDS or not math.isfinite(found):
        raise _Wrong(f"{name} must be a number of seconds from {low:g}, found {text!r}")
    return float(found)


def _phase(text: str) -> str:
    if text not in PHASES:
        raise _Wrong(f"unknown phase during={text}; {did_you_mean(text, PHASES)}")
    return text


_READERS: dict[str, Callable[[str], Any]] = {
    "rank": lambda text: _count(text, 0, "rank"),
    "step": lambda text: _span(text, "step"),
    "commit": lambda text: _span(text, "commit"),
    "op": lambda text: _count(text, 1, "op"),
    "seconds": lambda text: _seconds(text, 0, "seconds"),
    "sample": lambda text: _count(text, 0, "sample"),
    "during": _phase,
}


# Random faults


def _random(value: str, places: Mapping[str, str]) -> RandomFaults:
    _check_places(RANDOM, RANDOM_PLACES, places)
    if "every" not in places:
        raise _Wrong("random needs the seconds between two faults: random:kill,stop@every=15s")
    choices = tuple(_choice(part.strip()) for part in value.split(",")) if value else ()
    if not choices:
        raise _Wrong("random needs kinds to choose from: random:kill,stop@every=15s")
    return RandomFaults(
        choices,
        _seconds(places["every"], 0.1, "every"),
        _count(places.get("seed", "0"), 0, "seed"),
        _count(places["rank"], 0, "rank") if "rank" in places else None,
    )


def _choice(text: str) -> Fault:
    name, colon, value = text.partition(":")
    possible = [each for each, kind in KINDS.items() if kind.may_be_random]
    if name not in possible:
        raise _Wrong(f"random cannot choose {name!r}; {did_you_mean(name, possible)}")
    kind = KINDS[name]
    if kind.value is not None and not colon:
        return Fault(name, kind.value.usual)
    return Fault(name, _value(name, kind, value if colon else None))


# The number of workers


def check_ranks(specs: Iterable[Spec], size: int) -> None:
    """Raise ConfigError for a fault on a rank that `size` workers do not have."""
    for spec in specs:
        if spec.rank is not None and spec.rank >= size:
            raise ConfigError(
                f"fault '{spec}': there is no rank {spec.rank} among {size}"
                f" worker{'s' if size > 1 else ''}; did you mean rank={size - 1}?"
            )


def check(text: str, size: int) -> None:
    """Raise ConfigError if the text of ALLSTEP_FAULTS is wrong, or wrong for `size` workers."""
    check_ranks(parse_all(text), size)
