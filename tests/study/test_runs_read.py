"""Figures of a run, from its record; updates are compared with a loop over batches."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.runlog import RunRecord
from allstep.study.results import figures, has_diverged, kept, num_updates, reached
from allstep.study.trial import Outcome, Status
from support.fake_trials import Steps, fake, lines


def record(steps: Steps) -> RunRecord:
    by_kind = {
        kind: tuple(line for _, line in steps if line["kind"] == kind)
        for kind in ("start", "step", "eval", "end")
    }
    return RunRecord(
        starts=by_kind["start"], steps=by_kind["step"], evals=by_kind["eval"], ends=by_kind["end"]
    )


@settings(max_examples=50)
@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 7))
def test_updates_against_a_loop(train: int, batch: int, num_batches: int) -> None:
    seen = 0
    for _ in range(num_batches):
        seen += min(batch, train - seen % train)
    assert num_updates(record(lines([], train=train)), seen, batch) == num_batches


def test_updates_of_a_set_of_unknown_size() -> None:
    assert num_updates(RunRecord(), 100, 30) == 4


def test_the_goal_is_reached_at_the_first_evaluation_that_is_good_enough() -> None:
    found = reached(record(lines([0.5, 0.8, 0.9, 0.7], seconds=2.0)), batch=300, goal=0.8)
    assert found is not None
    assert (found.samples, found.updates, found.seconds) == (2000, 8, 4.0)
    assert reached(record(lines([0.5])), batch=300, goal=0.8) is None


def test_what_a_resumed_run_told_twice_counts_once() -> None:
    """Cut after epoch 3 and resumed from the checkpoint of epoch 1."""
    told = record(
        lines([0.5, 0.95, 0.96], seconds=100.0) + lines([0.7, 0.9], first=1, test=0.88, seconds=2.0)
    )
    assert [line["samples"] for line in kept(told.steps)] == [1000, 2000, 3000]
    found = reached(told, batch=1000, goal=0.9)
    assert found is not None and (found.updates, found.seconds) == (3, 104.0)
    run = figures(Outcome(fake("a", []), "done", told), 1000, 0.9)
    assert (run.test, run.validation, run.updates, run.reached) == (0.88, 0.9, 3, found)


def test_a_loss_that_is_no_number_has_diverged() -> None:
    told = record(lines([0.1], test=0.1))
    lost = RunRecord(told.starts, ({**told.steps[0], "loss": None},), told.evals, ends=told.ends)
    assert figures(Outcome(fake("a", []), "done", told), 100, None).status == "done"
    run = figures(Outcome(fake("a", []), "done", lost), 100, None)
    assert run.diverged and run.test is None and run.validation is None


def test_a_run_that_told_of_it_has_diverged_whatever_its_last_lines_are() -> None:
    told = record(lines([0.1]))
    event = {
        "time": told.steps[-1]["time"],
        "text": "the loss is nan at step 3",
        "step": 3,
        "lr": 0.1,
    }
    spike = {
        "time": told.steps[-1]["time"],
        "text": "the loss rose and came back",
        "step": 3,
        "peak": 9.0,
    }
    for events, diverged in (((event,), True), ((spike,), False)):
        outcome = Outcome(
            fake("a", []), "failed", replace(told, events=events), "exit status 1\nlast words"
        )
        assert has_diverged(outcome) is diverged


@pytest.mark.parametrize(
    ("status", "reason", "diverged"),
    [
        ("failed", "exit status 1\nallstep: the loss diverged: nan after 40 updates", True),
        ("failed", "exit status 1\nno memory", False),
        ("stopped", "it diverged", False),
    ],
)
def test_a_run_that_diverged_is_a_result(status: Status, reason: str, diverged: bool) -> None:
    outcome = Outcome(fake("a", []), status, record(lines([0.1])), reason)
    assert has_diverged(outcome) is diverged
    run = figures(outcome, 100, 0.5)
    assert run.diverged is diverged and run.test is None and run.reached is None
