"""Runs a study: one trial per lane at a time, until nothing is wanted that has not ended.

```
        wanted(results) ──> not ended yet ──> a free lane ──> Child
              ^                                                 |  its record: rule says stop?  ──> let go, note
              └────────────── results <── outcome <─────────────┘  it ended: done, failed (note), or cut
```

What ended before, in this call or in an earlier one, is read from the folder and not run again. A
trial without an end was cut: it goes on, where its command can. A trial that fails is noted with
its last words, and the others go on. When the block ends, whether by its own end, an error or
Ctrl-C, no process is left; when we are killed, the leashes see to that.
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

_LOOK_SECONDS = 1.0  # between two looks at the records of what runs


@dataclass(frozen=True)
class State:
    """How far a study is."""

    results: Results
    running: Mapping[str, float | None]
    """Trials and how much of each is done, where that is known."""
    waiting: int
    """Trials that will be run after these, at most."""
    seconds_left: float | None
    """None while too little has been measured."""
    at_most: bool
    """Whether it may well be over sooner, because trials may be stopped or not wanted."""

    @property
    def total(self) -> int:
        """Trials, at most."""
        return len(self.results) + len(self.running) + self.waiting


class StudyCallback:
    """Is told how a study goes. This one does not listen."""

    def state(self, state: State) -> None:
        """About once a second."""

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """A trial ended, in this call, after so many seconds."""


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
) -> dict[str, Outcome]:
    """Runs what `study` wants, `lanes` trials at a time; how all of it ended.

    `until` ends it early, for instance once there is a forecast. What ran then goes on the next
    time. `retry`: those that failed, too.
    """
    with folder.held(study):
        if retry:
            folder.forget_failures()
        runner = _Runner(study, folder, lanes, callback or StudyCallback())
        try:
            runner.go(until)
        finally:
            runner.end_all()
        return runner.results


def collect(study: Study, folder: StudyFolder) -> dict[str, Outcome]:
    """What ended so far, without running anything."""
    results: dict[str, Outcome] = {}
    _look_up(study, folder, results, ())
    return results


def _look_up(
    study: Study, folder: StudyFolder, results: dict[str, Outcome], running: Container[str]
) -> list[Trial]:
    """Adds what ended before to `results`; what is wanted besides.

    Each result may change that, so it asks until nothing is new.
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
        self, study: Study, folder: StudyFolder, lanes: int, callback: StudyCallback
    ) -> None:
        self.study, self.folder, self.lanes, self.callback = study, folder, lanes, callback
        self.results: dict[str, Outcome] = {}
        self.running: dict[str, _Running] = {}
        self.waiting: list[Trial] = []
        self.cut: set[str] = set()
        self.forecast = Forecast()

    def go(self, until: Callable[[State], bool]) -> None:
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
        """Reads what ended before, then starts what is wanted, as far as there are lanes."""
        self._look_up()
        while self.waiting and len(self.running) < self.lanes:
            self._start(self.waiting.pop(0))

    def _look_up(self) -> None:
        known = set(self.results)
        open_ = _look_up(self.study, self.folder, self.results, self.running)
        self.waiting = [trial for trial in open_ if trial.name not in self.cut]
        for name in self.results.keys() - known:
            self.forecast.learn(self.results[name].trial, self.results[name].record)
            self.forecast.learn_part(self.results[name])

    def _start(self, trial: Trial) -> None:
        resumed = self.folder.prepare(trial)
        run_folder = self.folder.run(trial)
        child = Child(
            trial.words(run_folder, resumed=resumed),
            self.folder.output(trial),
            self.folder.lock(trial),
            os.environ,
        )
        self.running[trial.name] = _Running(trial, child, Follower(run_folder / "run.jsonl"))

    def _wait(self) -> None:
        """Until a trial ends, or it is time to look."""
        poll = select.poll()
        for each in self.running.values():
            poll.register(each.child, select.POLLIN)
        poll.poll(_LOOK_SECONDS * 1000)

    def _collect(self) -> None:
        for each in list(self.running.values()):
            if each.child.exit_code() is not None:
                self._conclude(each, each.child.close())

    def _conclude(self, each: _Running, code: int) -> None:
        """A trial ended by itself."""
        trial, record = each.trial, each.follower.record()
        if code == RESUBMIT:
            del self.running[trial.name]
            self.cut.add(trial.name)
        elif code == 0 and record.end is not None:
            self._keep(each, Outcome(trial, "done", record))
        else:
            why = "it ended without an `end` in its record" if code == 0 else f"exit status {code}"
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
                done = record.end is not None  # it was quicker than the rule
                self._keep(
                    each,
                    Outcome(
                        each.trial, "done" if done else "stopped", record, "" if done else reason
                    ),
                )

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
        known = len(self.results) + len(self.running) + len(self.waiting) + len(self.cut)
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
        return in_lanes(going, [*waiting, *[usual] * unknown], self.lanes)

    def end_all(self) -> None:
        """All at once; then wait for each."""
        for each in self.running.values():
            each.child.let_go()
        for each in self.running.values():
            each.child.close()
        self.running.clear()
