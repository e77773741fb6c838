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
from collections.abc import Callable, Collection, Mapping, Sequence
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
    position: int = 0
    """Samples of the run up to the end of the last update that is in the state."""
    samples_lost: int = 0
    """Samples that the position counts, but no update in the state."""
    elapsed: float = 0.0
    """Time since the start of training."""

    def __str__(self) -> str:
        left = f", {self.left} left" if self.left else ""
        return (
            f"{_workers(self.lost)} lost, {self.joined} joined{left},"
            f" {self.seconds:.1f} s without a step of {self.elapsed:,.0f} s,"
            f" {self.samples_lost:,} sample{'' if self.samples_lost == 1 else 's'} lost"
        )

    @property
    def has_any(self) -> bool:
        """Whether the world has changed at all."""
        return bool(self.lost or self.joined or self.left)


_Member = tuple[Any, ...]
"""A worker: host, process namespace and process number."""
_Seat = tuple[int, str]
"""The place of a worker in a world: rank and host."""
# Workers that the line about a change names.
_MAX_NAMED = 16


@dataclass(frozen=True)
class _Change:
    """A change of the world, until its first step."""

    was_lost: bool
    before: Mapping[_Member, _Seat]
    noticed: float
    left_at: float
    text: str = ""
    formed: float = 0.0
    formed_at: float = 0.0
    lost: tuple[_Seat, ...] = ()
    joined: tuple[_Seat, ...] = ()
    position: int = 0
    hosts: tuple[str, ...] = ()
    generation: int = 0
    is_due: bool = False


class Changes:
    """The changes of the world of one worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._last_step = clock()
        self._totals = Totals()
        self._change: _Change | None = None
        self.unconfirmed: tuple[str, dict[str, Any]] | None = None
        """The last change, until another step shows that rank 0 has recorded it."""
        # Of the last world.
        self._members: Mapping[_Member, _Seat] = {}

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

    def begin(self, place: Place, samples: int, is_due: bool) -> None:
        """Record that the run begins after `samples` samples, which may be those of a checkpoint.

        Workers that were lost before are a change, too. `is_due`: as in `form`.
        """
        self._totals = replace(self._totals, position=samples)
        if self._change is None:
            self.start(place)
        else:
            self.form(place, samples, is_due)

    def leave(self, *, was_lost: bool) -> None:
        """Record that this rank leaves its world now."""
        now = self._clock()
        if self._change is None:
            self._change = _Change(was_lost, self._members, now - self._last_step, now)
        elif was_lost:
            # The next world was lost before its first step.
            self._change = replace(self._change, was_lost=True)

    def form(self, place: Place, samples: int, is_due: bool) -> None:
        """Record that the next world has the state, after `samples` samples.

        `is_due`: what follows the last update, such as an evaluation, is repeated there.
        """
        now, size, members = self._clock(), len(place.cards), _members(place)
        if self._change is None:
            # This worker has just joined.
            others = {who: seat for who, seat in members.items() if seat[0] not in place.new}
            self._change = _Change(False, others, 0.0, now)
        change, self._members = self._change, members
        gone, joined = _missing(change.before, members), _missing(members, change.before)
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
            generation=place.generation,
            is_due=is_due,
        )

    def stop(self, num_left: int) -> None:
        """Record that the run stops before its next world; `num_left` workers are left."""
        change, self._change = self._change, None
        if change is not None:
            lost = len(change.lost) + max(0, len(self._members) - num_left)
            gap = change.noticed + self._clock() - change.left_at
            self._add(change, lost, gap)

    def note_push(self, commits: int) -> None:
        """Record an update of this worker within a round."""
        self._last_step = self._clock()
        report_updates(commits)

    def note_step(self, commits: int, before: int, after: int) -> None:
        """Record a finished step, which moved the position from `before` to `after`."""
        self._last_step = self._clock()
        # A rank 0 that has taken part in this step has recorded what followed the one before.
        self.unconfirmed = None
        report_updates(commits)
        totals = self._totals
        skipped = max(0, before - totals.position)
        self._totals = replace(totals, position=after, samples_lost=totals.samples_lost + skipped)

    def end_change(self) -> tuple[str, dict[str, Any]] | None:
        """Return text and figures of the event about the last change; None if it was returned."""
        if self._change is None:
            return None
        change, self._change = self._change, None
        first = self._clock() - change.formed_at
        gap = change.noticed + change.formed + first
        self._add(change, len(change.lost), gap)
        parts = {"noticed": change.noticed, "formed": change.formed, "first_step": first}
        seconds = ", ".join(f"{name.replace('_', ' ')} {each:.2f}" for name, each in parts.items())
        figures = {
            "generation": change.generation,
            "position": change.position,
            "workers": len(change.hosts),
            "hosts": list(change.hosts),
            "due": change.is_due,
            "lost": len(change.lost),
            "joined": len(change.joined),
            "lost_workers": [_named([seat]) for seat in change.lost],
            "joined_workers": [_named([seat]) for seat in change.joined],
            "gap": gap,
            **parts,
        }
        text = f"{change.text} after {gap:.2f} s without a step ({seconds})"
        self.unconfirmed = text, figures
        return self.unconfirmed

    def _add(self, change: _Change, gone: int, gap: float) -> None:
        """Add a change to the totals. gone: workers that are lost, or have left in order."""
        before = self._totals
        self._totals = replace(
            before,
            lost=before.lost + (gone if change.was_lost else 0),
            joined=before.joined + len(change.joined),
            left=before.left + (0 if change.was_lost else gone),
            seconds=before.seconds + gap,
        )


def _members(place: Place) -> dict[_Member, _Seat]:
    return {_member(card): (rank, card["host"]) for rank, card in enumerate(place.cards)}


def _member(card: dict[str, Any]) -> _Member:
    return card["host"], str(card["namespace"]), card["pid"]


def _missing(these: Mapping[_Member, _Seat], others: Collection[_Member]) -> tuple[_Seat, ...]:
    """Return the seats of those members that are not among the others, by rank."""
    return tuple(sorted(seat for member, seat in these.items() if member not in others))


def _what(reason: str, gone: Sequence[_Seat], joined: Sequence[_Seat], *, was_lost: bool) -> str:
    """Return what happened to the world before, of which `reason` is the launcher's.

    The ranks of lost workers are those of the world before, of new ones those of the next world.
    """
    more = f"{_workers(len(joined))} joined ({_named(joined)})" if joined else ""
    verb = "lost" if was_lost else "left"
    fewer = f"{_workers(len(gone))} {verb} ({_named(gone)})" if gone else ""
    if was_lost:
        # The reason names the first one.
        is_named = len(gone) == 1 and f"{_named(gone)}:" in reason
        return "; ".join(filter(None, [reason, "" if is_named else fewer, more]))
    return ", ".join(filter(None, [more, fewer])) or reason


def _named(seats: Sequence[_Seat]) -> str:
    """Return ranks and hosts as text: `ranks 0, 2 on a, rank 5 on b`."""
    ranks: dict[str, list[int]] = {}
    for rank, host in seats[:_MAX_NAMED]:
        ranks.setdefault(host, []).append(rank)
    texts = [
        f"rank{'' if len(each) == 1 else 's'} {', '.join(map(str, each))} on {host}"
        for host, each in ranks.items()
    ]
    rest = len(seats) - _MAX_NAMED
    return ", ".join(texts) + (f" and {rest} more" if rest > 0 else "")


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"
