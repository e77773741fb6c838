"""The points of a process at which a fault may occur: the calls that other packages make.

```
train loop, DistributedOptimizer       at_step, in_step, reduce_begins, update_begins, step_ends
checkpoints, elastic states            at_commit, at_write
process group, rendezvous, broadcast   at_op, in_phase
readers of records                     reading, changed
```

Each point asks the `Schedule`, reports what is due (`Reports`) and acts (`acts`). What needs a
tensor or a connection is left to the caller: `takes` returns whether it must act, and `handle`
registers a function.
"""

import atexit
import errno
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

from allstep.faults.acts import ACTS, agent_pid
from allstep.faults.elastic import WorkerFaults
from allstep.faults.kinds import EFFECTS, KINDS
from allstep.faults.missing import print_missing
from allstep.faults.pace import Pace
from allstep.faults.reports import Occurred, Reports
from allstep.faults.schedule import Planned, Schedule
from allstep.faults.spec import Fault, Spec, parse_all

# Bytes that `corrupt` inverts, in the middle of a record.
_NUM_CHANGED = 8


class Injector:
    """The faults of this process. All methods are for the thread of the point that they name.

    handlers: what other packages do for a kind, by kind. skipped: seconds of the sequences of
    random faults that are over.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        rank: int,
        size: int,
        handlers: dict[str, Callable[[], None]],
        skipped: float = 0.0,
    ) -> None:
        self.specs, self.rank, self.size = specs, rank, size
        self.reports = Reports(rank)
        self._handlers = handlers
        self._schedule = Schedule(specs, rank, size, skipped)
        self._pace = Pace()
        self._lock = threading.RLock()
        self._effects: set[str] = set()
        self._factor = 1.0
        self._num_steps, self._in_step, self._step_text = 0, False, "step 0"
        self._reported: set[tuple[str, Fault]] = set()
        # Timed faults that must occur in the thread that trains.
        self._waiting: list[Planned] = []
        self._reading = threading.local()
        self._ended = threading.Event()

    @classmethod
    def of(
        cls,
        text: str,
        rank: int,
        size: int,
        handlers: dict[str, Callable[[], None]],
        own: WorkerFaults | None = None,
    ) -> "Injector":
        """Return the faults of a text for a rank among `size`; ConfigError if one is wrong.

        own: of a worker of an elastic run; its rank counts then.
        """
        own = WorkerFaults(rank) if own is None else own
        made = cls(parse_all(text), own.rank, size, handlers, own.seconds)
        made.check_agent()
        return made

    def name_missing_at_exit(self) -> None:
        """Print at exit what did not occur, unless the launcher does."""
        atexit.register(print_missing, self.specs, self.reports)

    def check_agent(self) -> None:
        """Raise ConfigError if a fault needs an agent and this process has none."""
        for spec in self.specs:
            for fault in (spec,) if isinstance(spec, Fault) else spec.choices:
                if fault.kind == "kill-agent":
                    agent_pid(fault)

    def keep_only(self, kind: str) -> None:
        """Drop the faults of other kinds: this is a helper process of a rank."""
        self._schedule.keep_only(kind)

    # Steps

    def at_step(self, number: int, samples: Container[int] = ()) -> None:
        """Start step `number`, from 1; its compute part follows. samples: this rank's share."""
        self._pace.begin()
        self._start_step(number, samples)

    def in_step(self, unable: Container[str] = ()) -> bool:
        """Count a step of a script, unless one is in progress; its compute part is over.

        Return whether it is a new one. unable: kinds that the caller cannot carry out.
        """
        if self._in_step:
            return False
        self._in_step = True
        self._num_steps += 1
        self._start_step(self._num_steps, unable=unable)
        return True

    def _start_step(
        self, number: int, samples: Container[int] = (), unable: Container[str] = ()
    ) -> None:
        self._effects.clear()
        self._factor = 1.0
        self.reports.poll()
        self._do_waiting(unable)
        self._step_text = f"step {number}"
        self._fire(self._schedule.at_step(number, samples, unable), f"at {self._step_text}")

    def reduce_begins(self) -> None:
        """Sleep if this rank is slow; then the reduction of the gradients begins."""
        if self._factor > 1.0:
            self._pace.sleep(self._factor)
        self._fire(self._schedule.in_phase("reduce"), f"during the reduction of {self._step_text}")

    def update_begins(self) -> None:
        """Start the update of the weights."""
        self._pace.update_begins()
        self._fire(self._schedule.in_phase("update"), f"during the update of {self._step_text}")

    def step_ends(self) -> None:
        """End the step."""
        self._in_step = False
        self._pace.end()

    def takes(self, kind: str) -> bool:
        """Return whether the caller must carry out this kind in the current step; once."""
        found = kind in self._effects
        self._effects.discard(kind)
        return found

    def has(self, kind: str) -> bool:
        """Return whether this kind applies to the current step."""
        return kind in self._effects

    # Other points

    def in_phase(self, phase: str) -> None:
        """Start a phase that belongs to no step: `forming` or `broadcast`."""
        # A world forms again after a step that failed.
        self._in_step = False
        self._fire(self._schedule.in_phase(phase), f"during {phase}")

    def at_commit(self) -> None:
        """Count a checkpoint of `allstep train`, or a commit of an elastic state."""
        due = self._schedule.at_commit()
        self._fire(due, f"at commit {self._schedule.num_commits}")

    def at_write(self, path: str) -> None:
        """Raise OSError if the disk is full for the checkpoint that is written to `path` now."""
        due = self._schedule.at_write()
        self._fire(due, f"at commit {self._schedule.num_writes}")
        if due:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected)", path)

    @property
    def counts_ops(self) -> bool:
        """Return whether `at_op` must be called."""
        return self._schedule.counts_ops

    def at_op(self) -> None:
        """Count a collective of the default group."""
        self._do_waiting(unable=EFFECTS)
        due = self._schedule.at_op()
        self._fire(due, f"at collective {self._schedule.num_ops}")

    # Records

    def corrupts(self, samples: Iterable[int]) -> bool:
        """Return whether one of these records is to be read with damaged bytes."""
        return any(self._schedule.at_read(sample) for sample in samples)

    @contextmanager
    def reading(self, sample: int) -> Iterator[None]:
        """Damage the bytes that `changed` gets within the block, if that is due."""
        due = self._schedule.at_read(sample)
        self._reading.is_due = bool(due)
        try:
            self._fire(due, f"at sample {sample}")
            yield
        finally:
            self._reading.is_due = False

    def changed(self, content: bytes | bytearray | memoryview) -> bytes | None:
        """Return damaged bytes for those of the record that is being read; None to use them."""
        if not getattr(self._reading, "is_due", False) or not len(content):
            return None
        # Once: what is computed from these bytes is damaged already.
        self._reading.is_due = False
        damaged = bytearray(content)
        start = max(0, (len(damaged) - _NUM_CHANGED) // 2)
        for place in range(start, min(len(damaged), start + _NUM_CHANGED)):
            damaged[place] ^= 0xFF
        return bytes(damaged)

    # Moments

    def start_clock(self) -> None:
        """Start the thread of the timed faults, if there are any; the time counts from now."""
        if self._schedule.next_time is not None:
            threading.Thread(target=self._watch_time, name="allstep-faults", daemon=True).start()

    def end(self) -> None:
        """End the thread of the timed faults."""
        self._ended.set()

    def _watch_time(self) -> None:
        began = time.monotonic()
        while (moment := self._schedule.next_time) is not None:
            if self._ended.wait(max(0.0, began + moment - time.monotonic())):
                return
            for planned in self._schedule.at_time(time.monotonic() - began):
                if KINDS[planned.fault.kind].in_thread:
                    self._fire([planned], f"after {planned.fault.seconds:g} s")
                else:
                    self._waiting.append(planned)

    def _do_waiting(self, unable: Container[str]) -> None:
        """Carry out the timed faults that have waited for the thread that trains."""
        for planned in tuple(self._waiting):
            if planned.fault.kind not in unable:
                self._waiting.remove(planned)
                self._fire([planned], f"after {planned.fault.seconds:g} s")

    # Acting

    def _fire(self, due: Iterable[Planned], where: str) -> None:
        for planned in due:
            with self._lock:
                self._report(planned, where)
            self._act(planned.fault)

    def _report(self, planned: Planned, where: str) -> None:
        """Report a fault; one that repeats only when it occurs first."""
        mark = planned.origin, planned.fault
        if mark not in self._reported:
            self._reported.add(mark)
            text = f"rank {self.rank} {planned.fault.does} {where}"
            self.reports.send(Occurred(planned.origin, self.rank, text))

    def _act(self, fault: Fault) -> None:
        if fault.kind == "raise":
            # A script may catch the exception and continue with another step.
            self._in_step = False
        if fault.kind in ACTS:
            ACTS[fault.kind](fault)
        elif fault.kind in self._handlers:
            self._handlers[fault.kind]()
        elif fault.kind == "slow":
            assert fault.value is not None
            self._factor = max(self._factor, fault.value)
        else:
            self._effects.add(fault.kind)
