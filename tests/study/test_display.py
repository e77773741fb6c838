"""What a study says while it runs, in lines and in a bar."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.progress import Progress

from allstep.runlog import RunRecord
from allstep.study.display import Bar, Lines, in_a_line, shown
from allstep.study.runner import State
from allstep.study.trial import Outcome
from support.fake_trials import fake

RECORD = RunRecord(
    evals=({"part": "validation", "accuracy": 0.5}, {"part": "test", "accuracy": 0.9123})
)
DONE = Outcome(fake("a", []), "done", RECORD)
STOPPED = Outcome(fake("b", []), "stopped", RunRecord(), "twice the best")
FAILED = Outcome(fake("c", []), "failed", RECORD, "exit status 1\nTraceback\nthe cause")


def state(
    ended: int = 0, left: float | None = None, at_most: bool = False, **running: float | None
) -> State:
    return State({f"ended{i}": DONE for i in range(ended)}, running, 3, left, at_most)


def tell(callback: Lines) -> None:
    callback.state(state(a=None))
    callback.state(state(a=0.5, left=130.0))
    callback.ended(DONE, 65.0)
    callback.state(state(ended=1, left=110.0, b=0.2))
    callback.ended(STOPPED, 100.0)
    callback.ended(FAILED, 3.0)
    callback.state(state(ended=3))


SAID = """\
4 runs, 2 at a time; the time is estimated from the first ones
they will take about 2 min
a: done, test accuracy 91.23%, after 65 s
b: stopped (twice the best), after 2 min
c: failed, test accuracy 91.23%, after 3 s
    exit status 1
    Traceback
    the cause
"""


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(2) as callback:
        assert type(callback) is Lines
        tell(callback)
    assert capsys.readouterr().err == SAID


def test_the_training_sample_is_not_how_good_a_trial_was() -> None:
    """A trial that was killed after its last evaluation, of which the training sample is the last
    line."""
    evals = [{"part": "validation", "accuracy": 0.8}, {"part": "train", "accuracy": 0.99}]
    outcome = replace(DONE, record=RunRecord(evals=tuple(evals)))
    assert in_a_line(outcome) == "done, validation accuracy 80.00%"


def test_what_goes_on_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    Lines(2).state(state(ended=5, left=7200.0, at_most=True, a=0.1))
    said = (
        "at most 9 runs, 5 of them ended before, 2 at a time\nthe rest will take at most about 2 h"
        " 00 min\n"
    )
    assert capsys.readouterr().err == said


def test_nothing_to_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Lines(2).state(State({"a": DONE}, {}, 0, None, False))
    assert capsys.readouterr().err == ""


def test_a_bar() -> None:
    """The same lines, and at the end only the bar of the study."""
    text = io.StringIO()
    progress = Progress(
        "{task.description}", "{task.fields[more]}", console=Console(file=text, width=100)
    )
    tell(Bar(2, progress))
    assert "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines()) == SAID
    (task,) = progress.tasks
    assert (task.description, task.completed, task.total) == ("study", 3, 6)
    assert task.fields["more"] == "3 of 6 runs ended"
