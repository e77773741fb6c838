"""Over- and underfitting: what is compared with what, and when there is no verdict."""

from typing import Any

import pytest

from allstep.report import Judgement, judge
from allstep.report.compared import Measured, compared
from allstep.report.fit import look, no_verdict
from allstep.report.scores import scores
from support.synthetic_runs import BEGAN, SIZE, lines, record

LATER = BEGAN + 1000.0


def only(**changes: Any) -> Judgement:
    (said,) = judge(record(lines(**changes)), LATER)
    return said


def with_config(made: list[dict[str, Any]], section: str, **values: Any) -> list[dict[str, Any]]:
    config = made[0]["config"]
    made[0]["config"] = (
        {**config, section: {**config[section], **values}} if section else {**config, **values}
    )
    return made


# The three cases of the issue


def test_one_epoch_that_went_well_is_too_short_for_a_verdict() -> None:
    """The mean over the epoch was 40% wrong, because it began with 90%; at its end the model is as
    good in training as in validation."""
    said = only(
        epochs=1,
        train_error=lambda epoch: 0.9 - epoch,
        sample_error=0.088,
        validation_error=lambda epoch: 0.09,
    )
    assert (said.rule, said.severity) == ("no_verdict", "hint")
    assert said.title == "Too short for a verdict on over- or underfitting"
    assert (
        said.figures == "1 epoch with 1 evaluation, which does not show whether it still improves; "
        "training error 8.8%, validation error 9.0%"
    )


def test_underfitting() -> None:
    """The steps saw 50% wrong, because of augmentation; it is the 25% of the training sample that
    are judged."""
    made = lines(train_error=lambda e: 0.5, sample_error=0.25, validation_error=lambda e: 0.27)
    (said,) = judge(record(with_config(made, "data", augment="Flip()")), LATER)
    assert (said.rule, said.severity) == ("high_training_error", "problem")
    assert (
        said.figures
        == "training error 25.0% of 10,000 samples in evaluation mode, validation +2.0 points"
        " from it"
    )
    assert "The model does not fit its training data" in said.advice


def test_overfitting_that_augmentation_hides_in_the_steps() -> None:
    """The steps saw as many errors as validation did; without augmentation and dropout there are
    almost none."""
    said = only(train_error=lambda e: 0.12, sample_error=0.005, validation_error=lambda e: 0.12)
    assert (said.rule, said.severity) == ("overfitting", "problem")
    assert said.figures == "training error 0.5%, validation error 12.0%: +11.5 points"


# What is compared


def test_the_sample_is_compared_with_the_validation_of_the_same_weights() -> None:
    """The best weights are those of epoch 5; the last validation is of other weights."""
    made = lines(validation_error=lambda e: 0.03 if e == 5 else 0.3)
    sample = next(line for line in made if line.get("part") == "train")
    sample["samples"] = 5 * SIZE
    found = compared(record(made))
    assert found.is_evaluated
    assert found.validation is not None and found.validation.error == pytest.approx(0.03)
    assert found.gap == pytest.approx(-0.02)
    sample["samples"] = 5 * SIZE + 1
    assert not compared(record(made)).is_evaluated


def test_a_sample_that_a_resume_made_void_is_not_compared() -> None:
    """Killed between the sample and its end, and resumed from epoch 6: the steps count, up to the
    last validation."""
    ended = [line for line in lines(train_error=lambda e: 0.05) if line["kind"] != "end"]
    again = lines(end=False, began=LATER, train_error=lambda e: 0.07 if e <= 7 else 0.5)
    rest = [again[0], *(line for line in again[1:] if 6 * SIZE < line["samples"] < 8 * SIZE)]
    found = compared(record([*ended, *rest]))
    assert found.train is not None and not found.is_evaluated
    assert found.train.error == pytest.approx(0.07)


def test_without_a_sample_the_last_tenth_of_an_epoch_counts() -> None:
    found = compared(record(lines(sample=False, train_error=lambda e: 0.05 if e > 7.95 else 0.5)))
    assert found.train is not None and not found.is_evaluated
    assert (found.train.error, found.train.count) == (pytest.approx(0.05), SIZE / 10)


def test_a_line_that_began_before_the_last_tenth_counts_for_its_part() -> None:
    """3 lines an epoch: the last has 334 samples, of which 100 count."""
    found = compared(
        record(lines(sample=False, per_epoch=3, train_error=lambda e: 0.2 if e == 8 else 0.9))
    )
    assert found.train is not None
    assert (found.train.error, found.train.count) == (pytest.approx(0.2), pytest.approx(100))


HIGH = {"sample": False, "train_error": lambda e: 0.3, "validation_error": lambda e: 0.3}


def test_steps_that_were_trained_as_they_are_evaluated_are_judged() -> None:
    said = only(**HIGH)
    assert said.rule == "high_training_error"
    assert (
        said.figures
        == "training error 30.0% in the last tenth of an epoch of training steps, validation +0.0"
        " points from it"
    )


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("data", {"augment": "Flip()"}, "augmentation"),
        ("data", {"augment": "Flip()", "mix": "Mixup(0.2)"}, "augmentation and mixed samples"),
        ("", {"label_smoothing": 0.1}, "label smoothing"),
        ("ema", {"decay": 0.9}, "weights that are not the averaged ones"),
        ("evaluation", {"flip": True}, "no flipped images"),
        ("model", {"options": {"dropout": 0.5}}, "dropout"),
        ("model", {"name": "vgg16", "options": {}}, "dropout"),
        ("model", {"name": "mine.models:make", "options": {}}, "dropout"),
    ],
)
def test_steps_that_cannot_be_compared_show_no_underfitting(
    section: str, values: dict[str, Any], words: str
) -> None:
    (said,) = judge(record(with_config(lines(**HIGH), section, **values)), LATER)
    assert (said.rule, said.title) == ("no_verdict", "No verdict on underfitting")
    assert (
        said.figures
        == f"training error 30.0%, validation error 30.0%; training steps had {words}, which makes"
        " their error higher"
    )
    assert "allstep eval RUN --part train" in said.advice
    sampled = lines(**{**HIGH, "sample": True})
    (said,) = judge(record(with_config(sampled, section, **values)), LATER)
    assert said.rule == "high_training_error"


@pytest.mark.parametrize(
    ("old", "words"),
    [
        ({"average": {"decay": 0.9}}, "weights that are not the averaged ones"),
        ({"evaluation": {"mirror": True}}, "no flipped images"),
    ],
)
def test_a_run_from_before_keys_were_renamed(old: dict[str, Any], words: str) -> None:
    made = lines(**HIGH)
    made[0]["config"] = {
        key: value for key, value in made[0]["config"].items() if key not in ("ema", "evaluation")
    } | old
    (said,) = judge(record(made), LATER)
    assert f"training steps had {words}" in said.figures


def test_steps_that_cannot_be_compared_show_overfitting_all_the_same() -> None:
    """Their error is too high, so the gap is larger still."""
    made = lines(sample=False, train_error=lambda e: 0.02, validation_error=lambda e: 0.2)
    (said,) = judge(record(with_config(made, "data", augment="Flip()")), LATER)
    assert said.rule == "overfitting"


def test_a_model_whose_dropout_is_switched_off_can_be_compared() -> None:
    made = with_config(lines(**HIGH), "model", name="vgg16", options={"dropout": 0.0})
    (said,) = judge(record(made), LATER)
    assert said.rule == "high_training_error"


# When there is no verdict


def test_a_run_that_has_not_ended_has_its_own_reason() -> None:
    made = record(lines(epochs=1, end=False, train_error=lambda e: 0.5))
    assert [each.rule for each in judge(made, LATER)] == ["unfinished"]
    assert no_verdict(look(made)) is None


def test_a_run_that_diverged_is_not_said_to_underfit() -> None:
    told = {"kind": "event", "time": LATER, "text": "the loss is nan", "step": 3, "lr": 2.5}
    made = record(
        [*lines(end=False, train_error=lambda e: 0.9, validation_error=lambda e: 0.9), told]
    )
    assert [each.rule for each in judge(made, LATER)] == ["unfinished"]


def test_less_than_an_epoch_is_too_short() -> None:
    """`evaluation.stop_at` was reached after half an epoch; there were evaluations every tenth."""
    half = [line for line in lines(epochs=1, end=False) if line.get("samples", 0) <= SIZE / 2]
    score = {"loss": 0.3, "accuracy": 0.5, "count": 10_000}
    for samples in (400, 500):
        half.append(
            {"kind": "eval", "time": BEGAN + 9, "part": "validation", "samples": samples, **score}
        )
    half.append({"kind": "eval", "time": BEGAN + 9, "part": "train", "samples": 500, **score})
    (said,) = judge(record([*half, {"kind": "end", "time": BEGAN + 9}]), LATER)
    assert said.rule == "no_verdict"
    assert said.figures == "0.5 of an epoch; training error 50.0%, validation error 50.0%"


@pytest.mark.parametrize(
    ("fall", "rules"), [(0.81, ["high_training_error"]), (0.79, ["still_improving"])]
)
def test_with_few_evaluations_the_last_fall_decides(fall: float, rules: list[str]) -> None:
    error = {"train_error": lambda e: 0.3, "validation_error": lambda e: 0.3}
    made = record(lines(epochs=3, validation_loss=lambda e: fall**e, **error))
    assert [each.rule for each in judge(made, LATER)] == rules


def test_low_training_error_and_a_gap_are_overfitting_while_validation_improves() -> None:
    """Longer training cannot lower a training error of 0.5% by much: the gap will stay."""
    made = lines(
        train_error=lambda e: 0.005, validation_error=lambda e: 0.1, validation_loss=lambda e: 1 / e
    )
    assert {each.rule for each in judge(record(made), LATER)} == {"overfitting", "still_improving"}


def test_the_noise_of_an_error() -> None:
    """Reference: the standard error of a share, for many samples; never 0 for few."""
    assert Measured(0.2, 100_000).noise == pytest.approx(2 * (0.2 * 0.8 / 100_000) ** 0.5, rel=1e-3)
    assert Measured(0.0, 20).noise == pytest.approx(2 * (1 / 22 * 21 / 22 / 20) ** 0.5)
    assert Measured(0.2).noise == Measured(0.2, 0).noise == 0.0


# The table


def test_the_table_of_scores() -> None:
    found = scores(record(lines(train_error=lambda e: 0.05, validation_error=lambda e: 0.06)))
    assert found is not None and found.is_evaluated
    assert found.rows == (
        (
            "accuracy",
            "95.00% of 10,000",
            "94.00% of 10,000",
            "-1.0 ± 0.6 points",
            "93.00% of 10,000",
        ),
        ("loss", "0.28", "0.3", "+0.02", "0.3"),
    )


def test_the_table_of_a_run_without_a_sample_has_no_gap() -> None:
    found = scores(record(lines(sample=False)))
    assert found is not None and not found.is_evaluated
    assert [row[1:4] for row in found.rows] == [
        ("95.00% of 100", "94.00% of 10,000", "–"),
        ("0.1124", "0.3", "–"),
    ]
    assert scores(record(lines()[:3])) is None
