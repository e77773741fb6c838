"""Each rule speaks exactly when it should: a made-up run in which nothing stands out, and one
change at a time."""

from typing import Any

import pytest

from allstep.report import fit, judge
from allstep.report.compared import last_steps
from allstep.report.ending import status
from allstep.report.judge import RULES
from support.synthetic_runs import BEGAN, lines, record

LATER = BEGAN + 1000.0


def rules(now: float = LATER, **changes: Any) -> set[str]:
    return {judgement.rule for judgement in judge(record(lines(**changes)), now)}


def slow(rank: int, factor: float, workers: int = 4) -> dict[str, list[float]]:
    """Times in which one worker computes longer and the others wait for it."""
    compute = [0.3] * workers
    compute[rank] *= factor
    wait = [0.3 * factor - each + 0.02 for each in compute]
    return {"input": [0.01] * workers, "compute": compute, "wait": wait, "update": [0.02] * workers}


def share(phase: str, part: float) -> dict[str, list[float]]:
    """Times in which `phase` has `part` of the whole and compute the rest."""
    return {name: [part if name == phase else 0.0] for name in ("input", "wait", "update")} | {
        "compute": [1 - part]
    }


def parties(*samples: int, waited: float = 0.0) -> dict[str, Any]:
    """Parties of a synchronization point, with pushes of one sample."""
    ages = {"1": 1}
    return {
        str(rank): {"samples": number, "pushes": number, "waited": waited, "ages": ages}
        for rank, number in enumerate(samples)
    }


def test_a_run_in_which_nothing_stands_out() -> None:
    (said,) = judge(record(lines()), LATER)
    assert (said.rule, said.severity) == ("all_well", "good")
    assert (
        said.figures
        == "training error 5.0%, validation error 6.0%, at most 2.0% of a worker's time is waiting"
        " for input"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # high training error: from 10% on, when it is the larger part of the validation error
        (
            {"train_error": lambda e: 0.101, "validation_error": lambda e: 0.12},
            {"high_training_error"},
        ),
        ({"train_error": lambda e: 0.099, "validation_error": lambda e: 0.11}, {"all_well"}),
        (
            {"train_error": lambda e: 0.30, "validation_error": lambda e: 0.25},
            {"high_training_error"},
        ),
        (
            {"train_error": lambda e: 0.20, "validation_error": lambda e: 0.39},
            {"high_training_error"},
        ),
        ({"train_error": lambda e: 0.20, "validation_error": lambda e: 0.41}, {"overfitting"}),
        ({"train_error": lambda e: 0.5 if e <= 7 else 0.05}, {"all_well"}),  # only the end counts
        # no verdict: one evaluation, less than an epoch, few updates
        (
            {"train_error": lambda e: 0.30, "validation_error": lambda e: 0.3, "epochs": 1},
            {"no_verdict"},
        ),
        (
            {"train_error": lambda e: 0.01, "validation_error": lambda e: 0.3, "epochs": 1},
            {"no_verdict"},
        ),
        (
            {"train_error": lambda e: 0.30, "validation_error": lambda e: 0.3, "epochs": 2},
            {"high_training_error"},
        ),
        (
            {"train_error": lambda e: 0.01, "validation_error": lambda e: 0.3, "epochs": 2},
            {"overfitting"},
        ),
        ({"epochs": 4, "extra": lambda i: {"batch": 100}}, {"no_verdict"}),  # 40 updates
        ({"epochs": 5, "extra": lambda i: {"batch": 100}}, {"all_well"}),
        # overfitting: two points, half as much again, and more than the set's size can make
        ({"train_error": lambda e: 0.01, "validation_error": lambda e: 0.031}, {"overfitting"}),
        ({"train_error": lambda e: 0.01, "validation_error": lambda e: 0.029}, {"all_well"}),
        ({"train_error": lambda e: 0.06, "validation_error": lambda e: 0.085}, {"all_well"}),
        (
            {"train_error": lambda e: 0.01, "validation_error": lambda e: 0.03, "count": 200},
            {"no_verdict"},
        ),
        (
            {"train_error": lambda e: 0.01, "validation_error": lambda e: 0.04, "count": 400},
            {"overfitting"},
        ),
        # an error that the size of the sample cannot show
        (
            {"train_error": lambda e: 0.12, "validation_error": lambda e: 0.12, "count": 25},
            {"no_verdict"},
        ),
        (
            {"train_error": lambda e: 0.12, "validation_error": lambda e: 0.12, "count": 250},
            {"high_training_error"},
        ),
        # a validation loss that was lower before the last quarter, by a tenth
        ({"validation_loss": lambda e: 0.3 if e == 4 else 0.331}, {"validation_turned"}),
        ({"validation_loss": lambda e: 0.3 if e == 4 else 0.329}, {"all_well"}),
        ({"validation_loss": lambda e: 0.3 if e == 7 else 0.4}, {"all_well"}),
        (
            {"validation_loss": lambda e: 0.3 if e == 1 else 0.4, "epochs": 3},
            {"all_well"},
        ),  # too few to say
        # spikes: twice the ten lines before, and a tenth of the first loss
        ({"loss": lambda i: 0.41 if i == 50 else 0.2, "epochs": 8}, {"loss_spikes"}),
        ({"loss": lambda i: 0.39 if i == 50 else 0.2}, {"all_well"}),
        (
            {"loss": lambda i: 2.0 if i < 10 else 0.15 if i == 50 else 0.01},
            {"all_well"},
        ),  # noise at the bottom
        ({"loss": lambda i: 2.0 if i < 10 else 0.25 if i == 50 else 0.01}, {"loss_spikes"}),
        ({"loss": lambda i: 9.0 if i == 0 else 1.0}, {"all_well"}),  # the start is no spike
        # still improving: the last quarter took a twentieth away, and the best is at the end
        ({"validation_loss": lambda e: 0.40 if e <= 6 else 0.379}, {"still_improving"}),
        ({"validation_loss": lambda e: 0.40 if e <= 6 else 0.385}, {"all_well"}),
        ({"validation_loss": lambda e: 0.40 if e <= 6 else 0.379, "end": False}, {"unfinished"}),
        # times
        ({"times": share("input", 0.151)}, {"input_bound"}),
        ({"times": share("input", 0.149)}, {"all_well"}),
        ({"times": share("wait", 0.251)}, {"waiting"}),
        ({"times": share("wait", 0.249)}, {"all_well"}),
        ({"times": share("wait", 0.6), "workers": 1}, {"all_well"}),  # nobody to wait for
        ({"times": slow(2, 1.20), "workers": 4}, {"straggler"}),
        ({"times": slow(2, 1.10), "workers": 4}, {"all_well"}),
        ({"times": slow(0, 1.5, 1), "workers": 1}, {"all_well"}),
        # parties: what asynchronous steps gained, and what waiting for their bound cost in 40 s
        ({"points": [parties(100, 50)]}, {"asynchronous"}),
        ({"points": [parties(100, 100, waited=4.1)]}, {"asynchronous", "bound_waits"}),
        ({"points": [parties(100, 100, waited=3.9)]}, {"asynchronous"}),
        ({"points": [parties(100, 50)], "times": slow(1, 1.2, 2)}, {"asynchronous"}),
        # a run without an end
        ({"end": False}, {"unfinished"}),
    ],
)
def test_a_rule_speaks_exactly_when_it_should(changes: dict[str, Any], expected: set[str]) -> None:
    assert rules(**changes) == expected


def test_every_rule_is_among_the_cases() -> None:
    cases = test_a_rule_speaks_exactly_when_it_should.pytestmark[0].args[1]  # type: ignore[attr-defined]
    said = set().union(*(expected for _, expected in cases))
    assert {rule.__name__ for rule in (*fit.RULES, *RULES)} <= said


def test_a_judgement_has_the_figures_that_led_to_it() -> None:
    (said,) = judge(record(lines(times=slow(2, 1.2), workers=4)), LATER)
    assert (
        said.figures
        == "worker 2 on h1 works 1.18 times as long as the others, and was the slowest in 100% of"
        " 80 intervals"
    )
    (said,) = judge(record(lines(loss=lambda i: 0.8 if i in (40, 60, 61) else 0.2)), LATER)
    assert said.figures.startswith("2 times, the worst in epoch 4.1: 0.2 to 0.8, at lr 0.07")
    (said,) = judge(
        record(lines(train_error=lambda e: 0.01, validation_error=lambda e: 0.08)), LATER
    )
    assert said.figures == "training error 1.0%, validation error 8.0%: +7.0 points"
    assert "augmentation" in said.advice


def test_a_high_training_error_that_still_falls_wants_time_first() -> None:
    error = {"train_error": lambda e: 0.3, "validation_error": lambda e: 0.3}
    first, second = judge(record(lines(**error, validation_loss=lambda e: 1 / e**0.5)), LATER)
    assert (first.rule, second.rule) == ("high_training_error", "still_improving")
    assert "train longer first" in first.advice
    (only,) = judge(record(lines(**error, validation_loss=lambda e: 1 / e)), LATER)
    assert (only.rule, only.title) == ("still_improving", "Still improving: train longer")
    assert (
        only.figures
        == "validation loss fell from 0.1667 to 0.125 (25%) in the last quarter, too steeply for a"
        " verdict on over- or underfitting; so far training error 30.0%, validation error 30.0%"
    )
    (alone,) = judge(record(lines(**error)), LATER)
    assert "a bigger model" in alone.advice and "train longer first" not in alone.advice


def test_one_that_is_slowest_now_and_then_is_no_straggler() -> None:
    """Each of four workers takes its turn at being slow; in sum worker 2 is ahead by more than 15%,
    but seldom the slowest."""
    turns = [slow(rank, 1.2) for rank in (0, 1, 3)] + [slow(2, 4.0)]
    assert rules(workers=4, extra=lambda i: turns[i % 4]) == {"all_well"}


def test_a_run_that_goes_on_is_not_one_that_was_killed() -> None:
    made = record(lines(end=False))
    last = made.steps[-1]["time"]
    (going,) = judge(made, last + 60)
    assert (going.severity, going.title) == ("hint", "The run is still going")
    (stopped,) = judge(made, last + 7200)
    assert (stopped.severity, stopped.title) == ("problem", "The run did not end")
    assert stopped.figures == "8 of 8 epochs; last line 2 h ago"


def test_a_resumed_run_that_was_killed_again_did_not_end() -> None:
    made = lines() + lines(epochs=2, end=False, began=LATER)
    assert "unfinished" in {each.rule for each in judge(record(made), LATER * 2)}


def event(text: str, after: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"kind": "event", "time": LATER + after, "text": text, **fields}


def test_a_run_that_diverged_is_neither_going_nor_killed() -> None:
    told = event(
        "the loss is nan at step 3; the best so far was 2.298", step=3, samples=128, lr=2.5
    )
    made = record([*lines(epochs=2, end=False), told])
    for later in (1.0, 7200.0):
        assert status(made, LATER + later) == "diverged"
        said = judge(made, LATER + later)[0]
        assert (said.severity, said.title) == ("problem", "The run diverged")
        assert said.figures == f"{told['text']}, in epoch 0.128, at lr 2.5"
    spike = event("the loss rose to 9 at step 3 and came back", step=3, peak=9.0, best=1.0)
    assert status(record([*lines(end=False), spike]), LATER + 1) == "going"


def test_a_run_that_was_told_to_stop_has_not_failed_and_one_that_went_on_is_going() -> None:
    told = event("stopped and saved after 500 of 2000 samples: SIGTERM", samples=500)
    made = [*lines(epochs=1, end=False), told]
    (said,) = judge(record(made), LATER + 7200)
    assert (said.severity, said.title, said.figures) == (
        "hint",
        "The run was asked to stop",
        told["text"],
    )
    assert status(record(made), LATER + 7200) == "paused"
    assert status(record([*made, *lines(end=False, began=LATER + 10)]), LATER + 60) == "going"


def test_what_the_noise_scale_means_is_said_and_is_no_fault() -> None:
    first, last = judge(
        record([*lines(), event("noise scale about 296 samples.", noise_scale=296.0)]), LATER
    )
    assert (first.rule, last.rule, last.severity) == ("all_well", "batch_by_noise", "good")
    assert last.figures == "noise scale about 296 samples"


def test_a_loss_that_rose_while_the_accuracy_stayed_is_a_hint() -> None:
    risen = {"validation_loss": lambda e: 0.3 if e == 4 else 0.4}
    assert judge(record(lines(**risen)), LATER)[0].severity == "hint"
    fell = judge(
        record(lines(**risen, validation_error=lambda e: 0.05 if e == 4 else 0.06)), LATER
    )[0]
    assert (fell.rule, fell.severity) == ("validation_turned", "problem")


def test_a_record_with_a_start_only() -> None:
    (said,) = judge(record(lines()[:1]), BEGAN + 1)
    assert said.figures == "no step yet; last line 1 s ago"


def test_training_error_weighs_lines_by_their_samples() -> None:
    made = record(
        [
            lines()[0],
            *(
                {"kind": "step", "time": BEGAN + i, "samples": samples, "accuracy": accuracy}
                for i, (samples, accuracy) in enumerate([(1900, 0.1), (1960, 1.0), (2000, 0.5)])
            ),
        ]
    )
    found = last_steps(made)
    assert found is not None
    assert found.error == pytest.approx(1 - (60 * 1.0 + 40 * 0.5) / 100)
    assert found.count == 100


def test_records_that_say_little_are_judged_by_what_they_say() -> None:
    bare = [
        {"kind": "start", "time": BEGAN},
        {"kind": "step", "time": BEGAN + 1, "samples": 64, "loss": None, "input": [1]},
    ]
    (said,) = judge(record([*bare, {"kind": "end", "time": BEGAN + 2}]), LATER)
    assert said.figures == "the record has too few figures to judge"
