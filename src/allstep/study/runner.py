"""Run a study: one trial per lane at a time, until every wanted trial has ended.

```
    wanted(results) ──> not ended yet ──> free lane ──> Child
          ^                                               |  stop rule applies: kill, write note
          └──────────── results <── outcome <─────────────┘  exit: done, failed (note), interrupted
```

Trials that ended in this call or an earlier one are read from the folder and not run again. A trial
without an end was interrupted: it resumes if its command can, and starts again otherwise. A failed
trial gets a note with the last lines of its output, and the others continue. When `run` returns or
raises, also on Ctrl-C, no process is left; if the runner is killed, the supervisors end its
processes.
"""

import os
import select
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from allstep.launch import RESUBMIT
from allstep.runlog import RunRecord
from allstep.study.child import Child
from allstep.study.folder import StudyFolder
from allstep.study.forecast import Forecast, in_lanes
from allstep.study.study import Study
from allstep.study.tail import Follower
from allstep.study.trial import Outcome, Results, Trial

# between two reads of the records of running trials
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class State:
    """Progress of a study."""

    results: Results
    running: Mapping[str, float | None]
    """Names of running trials, and the fraction of each that is done, if known."""
    waiting: int
    """Upper limit of the trials that are still to be started."""
    seconds_left: float | None
    """Expected seconds until the end; None while too little has been measured."""
    at_most: bool
    """Whether `total` and `seconds_left` are upper limits, as trials may be stopped."""

    @property
    def total(self) -> int:
        """Upper limit of the number of trials."""
        return len(self.results) + len(self.running) + self.waiting


class StudyCallback:
    """Receiver of the progress of a study; the methods of this base class do nothing."""

    def state(self, state: State) -> None:
        """Receive the progress, about once a second."""

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """Receive the outcome of a trial that ended in this call, `seconds` after its start."""


@dataclass
class _Running:
    trial: Trial
    child: Child
    follower: Follower


def run(
    study: Study,
    folder: StudyFolder,
    lanes: int,
    callback: StudyCallback | None = None,
    until: Callable[[State], bool] = lambda state: False,
    retry: bool = False,
    cores: int | None = None,
) -> dict[str, Outcome]:
    """Run the trials that `study` wants, and return the outcomes by name of trial.

    `folder` stores the study; it must not be in use by another process. `lanes` is the number of
    trials that run at the same time. `callback` receives the progress (default: none). `until` is
    called with each state and ends the call early by returning True, for instance once there is a
    forecast; the trials that run then resume in the next call. `retry` runs failed trials again.
    `cores` limits the sum of the cores of the trials that run at the same time; one trial always
    runs.
    """
    with folder.held(study):
        if retry:
            folder.forget_failures()
        runner = _Runner(study, folder, lanes, callback or StudyCallback(), cores)
        try:
            runner.go(until)
        finally:
            runner.end_all()
        return runner.results


def collect(study: Study, folder: StudyFolder) -> dict[str, Outcome]:
    """Return the outcomes of the trials that have ended so far, without running any."""
    results: dict[str, Outcome] = {}
    _look_up(study, folder, results, ())
    return results


def _look_up(
    study: Study, folder: StudyFolder, results: dict[str, Outcome], running: Container[str]
) -> list[Trial]:
    """Add finished trials to `results`; return wanted ones that neither finished nor run.

    Each result may change what the study wants, so this repeats until there is no new result.
    """
    while True:
        known = len(results)
        wanted = study.wanted(results)
        missing = [
            trial for trial in wanted if trial.name not in results and trial.name not in running
        ]
        results.update(
            {
                trial.name: outcome
                for trial in missing
                if (outcome := folder.outcome(trial)) is not None
            }
        )
        if len(results) == known:
            return missing


class _Runner:
    def __init__(
        self,
        study: Study,
        folder: StudyFolder,
        lanes: int,
        callback: StudyCallback,
        cores: int | None,
    ) -> None:
        self.cores = cores
        self.study, self.folder, self.lanes, self.callback = study, folder, lanes, callback
        self.results: dict[str, Outcome] = {}
        self.running: dict[str, _Running] = {}
        self.waiting: list[Trial] = []
        # trials that asked to be started again later (exit status RESUBMIT)
        self.interrupted: set[str] = set()
        self.forecast = Forecast()

    def go(self, until: Callable[[State], bool]) -> None:
        """Run trials until none is wanted, or until `until` returns True for the state."""
        self._fill()
        while self.running:
            state = self._state()
            self.callback.state(state)
            if until(state):
                return
            self._wait()
            self._collect()
            self._apply_rule()
            self._fill()
        self.callback.state(self._state())

    def _fill(self) -> None:
        """Read the outcomes of finished trials, then start wanted ones while lanes are free."""
        self._look_up()
        while self.waiting and len(self.running) < self.lanes and self._fits(self.waiting[0]):
            self._start(self.waiting.pop(0))

    def _fits(self, trial: Trial) -> bool:
        """Return whether the cores suffice for one more trial.

        A trial does not overtake one that waits for cores: the order is part of some studies.
        """
        if self.cores is None or not self.running:
            return True
        return sum(each.trial.cores for each in self.running.values()) + trial.cores <= self.cores

    def _lanes(self, trials: list[Trial]) -> int:
        """Return how many of these trials run at the same time."""
        if self.cores is None or not trials:
            return self.lanes
        largest = max(trial.cores for trial in trials)
        return max(1, min(self.lanes, self.cores // largest))

    def _look_up(self) -> None:
        known = set(self.results)
        open_ = _look_up(self.study, self.folder, self.results, self.running)
        self.waiting = [trial for trial in open_ if trial.name not in self.interrupted]
        for name in self.results.keys() - known:
            self.forecast.learn(self.results[name].trial, self.results[name].record)
            self.forecast.learn_part(self.results[name])

    def _start(self, trial: Trial) -> None:
        resumed = self.folder.prepare(trial)
        run_folder = self.folder.run(trial)
        child = Child(
            trial.command_line(run_folder, resumed=resumed),
            self.folder.output(trial),
            self.folder.lock(trial),
            os.environ,
        )
        self.running[trial.name] = _Running(trial, child, Follower(run_folder / "run.jsonl"))

    def _wait(self) -> None:
        """Wait until a trial ends, at most until the next read of the records."""
        poll = select.poll()
        for each in self.running.values():
            poll.register(each.child, select.POLLIN)
        poll.poll(_LOOK_SECONDS * 1000)

    def _collect(self) -> None:
        for each in list(self.running.values()):
            if each.child.exit_code() is not None:
                self._conclude(each, each.child.close())

    def _conclude(self, each: _Running, code: int) -> None:
        """Record how a trial ended whose process has exited with `code`."""
        trial, record = each.trial, each.follower.record()
        if code == RESUBMIT:
            del self.running[trial.name]
            self.interrupted.add(trial.name)
        elif code == 0 and record.end is not None:
            self._keep(each, Outcome(trial, "done", record))
        else:
            why = (
                "its process ended without an `end` line in the run record"
                if code == 0
                else f"exit status {code}"
            )
            self._keep(
                each, Outcome(trial, "failed", record, f"{why}\n{self.folder.tail(trial)}".strip())
            )

    def _apply_rule(self) -> None:
        for each in list(self.running.values()):
            record = each.follower.record()
            self.forecast.learn(each.trial, record, each.child.began_at)
            reason = self.study.stop(each.trial, record, self.results) if self.study.stop else None
            if reason is not None:
                each.child.close()
                record = each.follower.record()
                # the trial may have ended by itself before it was killed
                if record.end is not None:
                    self._keep(each, Outcome(each.trial, "done", record))
                else:
                    self._keep(each, Outcome(each.trial, "stopped", record, reason))

    def _keep(self, each: _Running, outcome: Outcome) -> None:
        if outcome.status != "done":
            self.folder.write_note(outcome)
        del self.running[each.trial.name]
        self.results[each.trial.name] = outcome
        self.forecast.learn_end(each.trial, outcome.record, each.child.seconds)
        self.forecast.learn_part(outcome)
        self.callback.ended(outcome, each.child.seconds)

    def _state(self) -> State:
        records = {name: each.follower.record() for name, each in self.running.items()}
        running = {
            name: self.running[name].trial.fraction(record) for name, record in records.items()
        }
        known = len(self.results) + len(self.running) + len(self.waiting) + len(self.interrupted)
        unknown = max(0, self.study.most - known)
        left = self._seconds_left(records, unknown)
        at_most = unknown > 0 or self.study.stop is not None
        return State(dict(self.results), running, len(self.waiting) + unknown, left, at_most)

    def _seconds_left(self, records: Mapping[str, RunRecord], unknown: int) -> float | None:
        if self.forecast.pace is None:
            return None
        going = [
            self.forecast.left(self.running[name].trial, record) for name, record in records.items()
        ]
        waiting = [self.forecast.left(trial) for trial in self.waiting]
        trials = [each.trial for each in self.running.values()] + self.waiting
        usual = sum(self.forecast.left(trial) for trial in trials) / len(trials) if trials else 0.0
        return in_lanes(going, [*waiting, *[usual] * unknown], self._lanes(trials))

    def end_all(self) -> None:
        """Release all leashes, then wait for each process: they end in parallel."""
        for each in self.running.values():
            each.child.let_go()
        for each in self.running.values():
            each.child.close()
        self.running.clear()
