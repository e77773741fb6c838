"""What a run reports about changes of its world: one event for each, and the totals at its end.

```
last step        a wait fails, or the        the next world      first step
of the old       launcher asks to leave      has the state       of the new
world   |-- noticed --|-------- formed --------|--- first step ---|
```

Every rank counts the changes, because any of them may be rank 0 later; a worker that joins receives
the totals with the state.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from allstep.comm.group.init import report_updates
from allstep.comm.join.membership import Place


class LeaveWorld(Exception):
    """All ranks leave their world after a step, because the launcher has asked for it."""


@dataclass(frozen=True)
class Totals:
    """Changes of the world so far. left: workers whose hosts were withdrawn."""

    lost: int = 0
    joined: int = 0
    left: int = 0
    seconds: float = 0.0
    """Time without a step."""
    elapsed: float = 0.0
    """Time since the start of training."""

    def __str__(self) -> str:
        left = f", {self.left} left" if self.left else ""
        return (
            f"{_workers(self.lost)} lost, {self.joined} joined{left},"
            f" {self.seconds:.1f} s without a step of {self.elapsed:,.0f} s, 0 samples lost"
        )

    @property
    def has_any(self) -> bool:
        """Whether the world has changed at all."""
        return bool(self.lost or self.joined or self.left)


_Member = tuple[Any, ...]
"""A worker: host, process namespace and process number."""


@dataclass(frozen=True)
class _Change:
    """A change of the world, until its first step."""

    was_lost: bool
    before: frozenset[_Member]
    noticed: float
    left_at: float
    text: str = ""
    formed: float = 0.0
    formed_at: float = 0.0
    lost: int = 0
    joined: int = 0
    position: int = 0
    hosts: tuple[str, ...] = ()
    is_due: bool = False


class Changes:
    """The changes of the world of one worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._last_step = clock()
        self._totals = Totals()
        self._change: _Change | None = None
        # Of the last world.
        self._members: frozenset[_Member] = frozenset()

    @property
    def totals(self) -> Totals:
        """The changes so far."""
        return replace(self._totals, elapsed=self._clock() - self._started)

    def take(self, totals: Totals) -> None:
        """Continue with the totals of another worker."""
        self._totals = totals
        self._started = self._clock() - totals.elapsed

    def start(self, place: Place) -> None:
        """Record the members of the first world of this worker."""
        self._members = _members(place)

    def leave(self, *, was_lost: bool) -> None:
        """Record that this rank leaves its world now."""
        now = self._clock()
        if self._change is None:
            self._change = _Change(was_lost, self._members, now - self._last_step, now)
        elif was_lost:
            # The next world was lost before its first step.
            self._change = replace(self._change, was_lost=True)

    @property
    def is_pending(self) -> bool:
        """Whether this rank has left a world, and made no step in the next one yet."""
        return self._change is not None

    def form(self, place: Place, samples: int, *, is_due: bool) -> None:
        """Record that the next world has the state, after `samples` samples.

        `is_due`: what follows the last update, such as an evaluation, is repeated there.
        """
        now, members = self._clock(), _members(place)
        size = len(place.cards)
        if self._change is None:
            # This worker has just joined.
            others = frozenset(_member(card) for card in place.others)
            self._change = _Change(False, others, 0.0, now)
        change, self._members = self._change, members
        gone, joined = len(change.before - members), len(members - change.before)
        number = f"{_workers(size)} continue{'s' if size == 1 else ''} from sample {samples:,}"
        self._change = replace(
            change,
            text=f"{_what(place.reason, gone, joined, was_lost=change.was_lost)}; {number}",
            formed=now - change.left_at,
            formed_at=now,
            lost=gone,
            joined=joined,
            position=samples,
            hosts=tuple(card["host"] for card in place.cards),
            is_due=is_due,
        )

    def note_step(self, commits: int) -> tuple[str, dict[str, Any]] | None:
        """Record a finished step. Return text and figures of the event if it is the first."""
        self._last_step = self._clock()
        report_updates(commits)
        return self.end_change()

    def end_change(self) -> tuple[str, dict[str, Any]] | None:
        """Return text and figures of the event about the last change; None if it was returned."""
        if self._change is None:
            return None
        change, self._change = self._change, None
        first = self._clock() - change.formed_at
        gap = change.noticed + change.formed + first
        before = self._totals
        self._totals = Totals(
            before.lost + (change.lost if change.was_lost else 0),
            before.joined + change.joined,
            before.left + (0 if change.was_lost else change.lost),
            before.seconds + gap,
        )
        parts = {"noticed": change.noticed, "formed": change.formed, "first_step": first}
        seconds = ", ".join(f"{name.replace('_', ' ')} {each:.2f}" for name, each in parts.items())
        figures = {
            "position": change.position,
            "workers": len(change.hosts),
            "hosts": list(change.hosts),
            "due": change.is_due,
            "lost": change.lost,
            "joined": change.joined,
            "gap": gap,
            **parts,
        }
        return f"{change.text} after {gap:.2f} s without a step ({seconds})", figures


def _members(place: Place) -> frozenset[_Member]:
    return frozenset(map(_member, place.cards))


def _member(card: dict[str, Any]) -> _Member:
    return card["host"], str(card["namespace"]), card["pid"]


def _what(reason: str, gone: int, joined: int, *, was_lost: bool) -> str:
    """Return what happened to the world before, of which `reason` is the launcher's."""
    more = f"{_workers(joined)} joined" if joined else ""
    if was_lost:
        others = f" and {gone - 1} more" if gone > 1 else ""
        return "; ".join(filter(None, [f"{reason}{others}", more]))
    return ", ".join(filter(None, [more, f"{_workers(gone)} left" if gone else ""])) or reason


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"
