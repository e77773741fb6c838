"""Show the progress of a study on standard error.

A terminal gets a progress bar of the study and one of each running trial; other outputs get a plain
line once a minute. Both print a permanent line for each trial that has ended. The number of runs is
printed at the start, the expected time as soon as enough has been measured.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import indent
from typing import Any

from allstep.console.escape import escaped
from allstep.console.progress_bar import text_bar
from allstep.console.quantities import about
from allstep.study.runner import State, StudyCallback
from allstep.study.trial import Outcome

# between two plain lines
_SECONDS = 60.0


@contextmanager
def shown(lanes: int) -> Iterator[StudyCallback]:
    """Yield a callback that shows the progress of a study with `lanes` trials at a time."""
    if not sys.stderr.isatty():
        yield Lines(lanes)
        return
    with text_bar() as progress:
        yield Bar(lanes, progress)


class Lines(StudyCallback):
    """A callback that prints plain lines."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self._announced = self._counted = False
        self._last = time.monotonic()

    def state(self, state: State) -> None:
        """Print a line about the progress once a minute."""
        self._announce(state)
        if time.monotonic() - self._last >= _SECONDS:
            self._last = time.monotonic()
            self.show(summary(state))

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """Print how the trial ended; for a failed one also the end of its output."""
        self.show(f"{outcome.trial.name}: {in_a_line(outcome)}, after {about(seconds)}")
        if outcome.status == "failed":
            self.show(indent(outcome.reason, "    "))

    def show(self, line: str) -> None:
        """Print a line to standard error, with control characters escaped."""
        print(escaped(line, keep="\n"), file=sys.stderr, flush=True)

    def _announce(self, state: State) -> None:
        """Print the number of runs once, and the expected time once it is known."""
        if not state.running:
            return
        if not self._counted:
            self._counted = True
            self.show(opening(state, self.lanes))
        if not self._announced and state.seconds_left is not None:
            self._announced = True
            which = "the rest" if state.results else "they"
            self.show(
                f"{which} will take {'at most ' if state.at_most else ''}about"
                f" {about(state.seconds_left)}"
            )


class Bar(Lines):
    """A callback that shows bars of the study and its running trials below plain lines."""

    def __init__(self, lanes: int, progress: Any) -> None:
        super().__init__(lanes)
        self._progress = progress
        self._whole = progress.add_task("study", total=None, more="")
        self._tasks: dict[str, Any] = {}

    def state(self, state: State) -> None:
        """Update the bars."""
        self._announce(state)
        part = sum(fraction or 0.0 for fraction in state.running.values())
        self._progress.update(
            self._whole,
            completed=len(state.results) + part,
            total=max(1, state.total),
            more=summary(state),
        )
        for name in set(self._tasks) - set(state.running):
            self._progress.remove_task(self._tasks.pop(name))
        for name, fraction in state.running.items():
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(escaped(name), total=1.0, more="")
            self._progress.update(self._tasks[name], completed=fraction or 0.0)

    def show(self, line: str) -> None:
        """Print a line above the bars, with control characters escaped."""
        self._progress.console.print(escaped(line, keep="\n"), markup=False, soft_wrap=True)


def opening(state: State, lanes: int) -> str:
    """Return the line printed at the start: number of runs, finished ones, runs at a time."""
    ended = f"{len(state.results)} of them ended before, " if state.results else ""
    runs = f"{'at most ' if state.at_most else ''}{state.total} runs"
    more = "" if state.seconds_left is not None else "; the time is estimated from the first ones"
    return f"{runs}, {ended}{lanes} at a time{more}"


def summary(state: State) -> str:
    """Return the line about progress: finished and total runs, time left."""
    left = "" if state.seconds_left is None else f", about {about(state.seconds_left)} left"
    return (
        f"{len(state.results)} of {'at most ' if state.at_most else ''}{state.total} runs"
        f" ended{left}"
    )


def in_a_line(outcome: Outcome) -> str:
    """Return a trial's status and its last accuracy on a held-out split."""
    held_out = [line for line in outcome.record.evals if line.get("part") != "train"]
    scores = [line for line in held_out if isinstance(line.get("accuracy"), int | float)]
    why = f" ({outcome.reason})" if outcome.status == "stopped" else ""
    good = f", {scores[-1].get('part', '')} accuracy {scores[-1]['accuracy']:.2%}" if scores else ""
    return f"{outcome.status}{why}{good}"
