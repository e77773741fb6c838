"""Which faults of this rank are due at which point: pure, without clock, process or tensor.

The process calls a method at each point that it passes (a step, a phase of it, a commit, a
collective, a moment) and gets the faults that are due there. A fault of a kind that repeats is due
at each step or commit of its range, any other one once, at the first point that fits.
"""

import heapq
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from allstep.faults.kinds import EFFECTS, KINDS, STEP_PHASES
from allstep.faults.random_sequence import sequence
from allstep.faults.spec import Fault, RandomFaults, Spec

# Kinds that the owner of a file or record asks about; no step causes them.
_ASKED_FOR = ("disk-full", "corrupt")


@dataclass(frozen=True)
class Planned:
    """A fault of this rank. origin: the text that the user gave, also for a random one."""

    fault: Fault
    origin: str


class Schedule:
    """The faults of one rank among `size`, and what has been counted and done so far.

    skipped: seconds of the sequences of random faults that were over before this process began.
    """

    def __init__(self, specs: Iterable[Spec], rank: int, size: int, skipped: float = 0.0) -> None:
        self._planned: list[Planned] = []
        self._streams: list[Iterator[Planned]] = []
        self._num_random_at_ops = 0
        for spec in specs:
            if isinstance(spec, RandomFaults):
                if spec.rank in (None, rank):
                    self._streams.append(_stream(spec, rank, size, skipped))
                    self._num_random_at_ops += sum(map(_waits, spec.choices))
            elif spec.rank in (None, rank):
                self._planned.append(Planned(spec, str(spec)))
        self._done: set[int] = set()
        self._step: int | None = None
        self._samples: Container[int] = ()
        self.num_commits = self.num_writes = self.num_ops = 0
        self._order = count()
        self._timed = self._first_of_each()

    def _first_of_each(self) -> list[tuple[float, int, Planned, Iterator[Planned] | None]]:
        """Return a heap of the timed faults; of random ones only the next, with its stream."""
        heap: list[tuple[float, int, Planned, Iterator[Planned] | None]] = [
            (each.fault.seconds, next(self._order), each, None)
            for each in self._planned
            if each.fault.seconds is not None
        ]
        for stream in self._streams:
            first = next(stream)
            assert first.fault.seconds is not None
            heap.append((first.fault.seconds, next(self._order), first, stream))
        heapq.heapify(heap)
        return heap

    @property
    def counts_ops(self) -> bool:
        """Return whether a fault may occur at a collective of the default group."""
        return self._num_random_at_ops > 0 or any(
            each.fault.op is not None or (each.fault.seconds is not None and _waits(each.fault))
            for each in self._planned
        )

    def keep_only(self, kind: str) -> None:
        """Drop all faults of other kinds: this process only does a part of the rank's work."""
        self._planned = [each for each in self._planned if each.fault.kind == kind]
        self._timed = []

    # Points

    def at_step(
        self, number: int, samples: Container[int] = (), unable: Container[str] = ()
    ) -> list[Planned]:
        """Return what is due at the start of a step.

        samples: those of this rank's share. unable: kinds that cannot occur here.
        """
        self._step, self._samples = number, samples
        return self._take(
            lambda fault: (
                fault.during is None and fault.kind not in unable and self._is_in_step(fault)
            )
        )

    def in_phase(self, phase: str) -> list[Planned]:
        """Return what is due in a phase: of the current step, or forming or broadcast."""
        return self._take(lambda fault: fault.during == phase and self._is_in_step(fault))

    def at_commit(self) -> list[Planned]:
        """Count a commit; return what is due at it."""
        self.num_commits += 1
        return self._take(lambda fault: _is_at(fault, self.num_commits))

    def at_write(self) -> list[Planned]:
        """Count a checkpoint that is written; return the faults of its disk."""
        self.num_writes += 1
        return self._take(
            lambda fault: fault.commit is None or self.num_writes in fault.commit, "disk-full"
        )

    def at_op(self) -> list[Planned]:
        """Count a collective of the default group; return what is due at it."""
        self.num_ops += 1
        return self._take(lambda fault: fault.op == self.num_ops)

    def at_read(self, sample: int) -> list[Planned]:
        """Return the faults of a record; a damaged record stays damaged."""
        return [
            each
            for each in self._planned
            if each.fault.kind == "corrupt" and each.fault.sample == sample
        ]

    def at_time(self, seconds: float) -> list[Planned]:
        """Return what is due at a moment, in seconds since the start of the run."""
        due = []
        while self._timed and self._timed[0][0] <= seconds:
            _, _, planned, stream = heapq.heappop(self._timed)
            due.append(planned)
            if stream is not None:
                follows = next(stream)
                assert follows.fault.seconds is not None
                heapq.heappush(
                    self._timed, (follows.fault.seconds, next(self._order), follows, stream)
                )
        return due

    @property
    def next_time(self) -> float | None:
        """The moment of the next timed fault; None without one."""
        return self._timed[0][0] if self._timed else None

    # Conditions

    def _take(self, fits: Callable[[Fault], bool], asked_for: str = "") -> list[Planned]:
        due = []
        for number, each in enumerate(self._planned):
            fault = each.fault
            is_asked = fault.kind == asked_for if asked_for else fault.kind not in _ASKED_FOR
            if is_asked and number not in self._done and fits(fault):
                due.append(each)
                if not KINDS[fault.kind].repeats:
                    self._done.add(number)
        return due

    def _is_in_step(self, fault: Fault) -> bool:
        """Return whether a fault fits the current step, as far as its trigger is concerned."""
        if fault.commit is not None or fault.op is not None or fault.seconds is not None:
            return False
        if fault.sample is not None:
            return fault.sample in self._samples
        if self._step is None:
            # Trial steps before the first one have phases, too.
            return fault.step is None and fault.during not in STEP_PHASES
        return fault.step is None or self._step in fault.step


def _waits(fault: Fault) -> bool:
    """Return whether a timed fault waits for a step or a collective."""
    return not KINDS[fault.kind].in_thread and fault.kind not in EFFECTS


def _is_at(fault: Fault, commit: int) -> bool:
    return fault.commit is not None and commit in fault.commit


def _stream(spec: RandomFaults, rank: int, size: int, skipped: float) -> Iterator[Planned]:
    """Yield the random faults of one rank after the first `skipped` seconds."""
    # A rank that no fault of the sequence has would be searched forever.
    for fault in sequence(spec, max(size, rank + 1)):
        assert fault.seconds is not None
        if fault.rank == rank and fault.seconds > skipped:
            yield Planned(replace(fault, seconds=round(fault.seconds - skipped, 3)), str(spec))
