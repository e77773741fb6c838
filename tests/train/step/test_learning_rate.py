"""The learning rate by samples seen, against closed forms: warm-ups, all shapes, their ends."""

import math

import pytest

from allstep.errors import ConfigError
from allstep.train import read_config
from allstep.train.config.run_config import ScheduleConfig
from allstep.train.step.learning_rate import learning_rate, peak_lr

N = 1000
EPOCHS = 20
PLACES = [0.0, 0.03, 0.1, 0.3, 0.31, 0.5, 0.77, 0.999, 1.0]


def rates(*overrides: str) -> list[float]:
    """Return the learning rate at places of a run of 20 epochs, as fractions of the peak.

    There is no warm-up unless the overrides set one.
    """
    config = read_config("digits", [f"epochs={EPOCHS}", "schedule.warmup=0", *overrides]).resolved(
        1
    )
    rate = learning_rate(config, N)
    return [rate(round(place * EPOCHS * N)) / peak_lr(config) for place in PLACES]


def test_it_rises_to_its_peak_and_falls_to_nothing() -> None:
    config = read_config("digits", ["epochs=4", "schedule.warmup=1", "batch=64"]).resolved(1)
    rate = learning_rate(config, 640)
    assert rate(0) == pytest.approx(0.05 / 10)  # the first step counts
    assert rate(640 - 64) == pytest.approx(0.05)
    assert rate(640 + 960) == pytest.approx(0.025)
    assert 0 < rate(4 * 640 - 64) < 0.001


def test_the_batch_changes_the_peak_and_not_the_shape() -> None:
    small, large = (
        read_config("digits", [f"batch={batch}", "schedule.warmup=0"]).resolved(1)
        for batch in (64, 256)
    )
    assert peak_lr(large) == pytest.approx(4 * peak_lr(small))
    assert learning_rate(large, 1000)(5000) == pytest.approx(4 * learning_rate(small, 1000)(5000))


@pytest.mark.parametrize("end", [0.0, 0.07, 1.0])
@pytest.mark.parametrize(
    ("overrides", "form"),
    [
        (["schedule.shape=cosine"], lambda t: (1 + math.cos(math.pi * t)) / 2),
        (["schedule.shape=linear"], lambda t: 1 - t),
        (["schedule.shape=polynomial", "schedule.power=3"], lambda t: (1 - t) ** 3),
    ],
    ids=["cosine", "linear", "polynomial"],
)
def test_shapes_that_fall_to_nothing_end_at_the_given_value(
    overrides: list[str], form: object, end: float
) -> None:
    assert callable(form)
    expected = [end + (1 - end) * form(place) for place in PLACES]
    assert rates(*overrides, f"schedule.end={end}") == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("end", "meant"), [(0.0, 0.01), (0.2, 0.2), (1.0, 1.0)])
def test_an_exponential_falls_by_equal_factors_to_its_end(end: float, meant: float) -> None:
    assert rates("schedule.shape=exponential", f"schedule.end={end}") == pytest.approx(
        [meant**t for t in PLACES]
    )


@pytest.mark.parametrize("end", [0.0, 0.3, 1.0])
def test_constant_and_step_end_where_they_end(end: float) -> None:
    assert rates("schedule.shape=constant", f"schedule.end={end}") == [1.0] * len(PLACES)
    found = rates(
        "schedule.shape=step",
        "schedule.milestones=[6, 10]",
        "schedule.factor=0.2",
        f"schedule.end={end}",
    )
    assert found == pytest.approx([1, 1, 1, 0.2, 0.2, 0.04, 0.04, 0.04, 0.04])


@pytest.mark.parametrize(("end", "meant"), [(0.0, 4e-6), (0.1, 0.1)])
def test_one_cycle_rises_and_falls_once(end: float, meant: float) -> None:
    """From 0.04 over 30% of the run to the peak, then to the end, along half cosines; without a
    recipe's warm-up."""

    def form(t: float) -> float:
        if t <= 0.3:
            return 0.04 + 0.96 * (1 - math.cos(math.pi * t / 0.3)) / 2
        return meant + (1 - meant) * (1 + math.cos(math.pi * (t - 0.3) / 0.7)) / 2

    config = read_config(
        "digits", [f"epochs={EPOCHS}", "schedule.shape=one-cycle", f"schedule.end={end}"]
    ).resolved(1)
    rate = learning_rate(config, N)
    found = [rate(round(place * EPOCHS * N)) for place in PLACES]
    assert found == pytest.approx([0.05 * form(place) for place in PLACES])


def test_the_usual_warm_up_is_not_for_one_cycle() -> None:
    """Neither the default nor that of a recipe; one that the user sets stays, and `config.check`
    rejects it."""
    assert ScheduleConfig(shape="one-cycle").warmup == 0
    assert read_config("fashion-mnist", ["schedule.shape=one-cycle"]).resolved(1).warmup == 0
    assert (
        read_config("digits", ["schedule.shape=one-cycle", "schedule.warmup=2"]).resolved(1).warmup
        == 2
    )
    assert ScheduleConfig().warmup is ScheduleConfig(shape="linear").warmup is None
    assert ScheduleConfig(shape="one-cycle", warmup=None).warmup == 0


def test_a_warm_up_that_is_not_given_is_a_twentieth_of_the_run() -> None:
    """Of any run: also with more epochs, and with those that a large batch adds."""
    for epochs in (1, 6, 90):
        overrides = ["data.name=digits", f"epochs={epochs}", "batch=8", "optimizer.base_batch=8"]
        config = read_config("defaults", overrides)
        assert config.resolved(1).warmup == config.resolved(1).schedule.warmup == epochs / 20
        rate = learning_rate(config.resolved(1), N)
        assert rate(epochs * N // 20) == pytest.approx(0.1)
        assert rate(0) == pytest.approx(0.1 * 8 / (epochs * N / 20))
    longer = read_config(
        "defaults", ["data.name=digits", "epochs=20", "batch=1024", "schedule.keep_updates=true"]
    ).resolved(1)
    assert (longer.num_epochs, longer.schedule.warmup) == (80, 4.0)
    without = read_config("defaults", ["data.name=digits", "schedule.warmup_kind=none"]).resolved(1)
    assert without.warmup == 0


@pytest.mark.parametrize("num_train", [640, 1294, 55_000])
def test_milestones_come_with_the_step_that_begins_there(num_train: int) -> None:
    """Epochs from the start of the run, with any warm-up; 30, 60 and 80 of 90 by default."""
    for overrides, milestones in (
        ([], (30, 60, 80)),
        (["schedule.milestones=[7, 11.5, 80]"], (7, 11.5, 80)),
    ):
        config = read_config(
            "digits", ["epochs=90", "schedule.shape=step", "schedule.warmup=0.7", *overrides]
        ).resolved(1)
        rate = learning_rate(config, num_train)
        for number, epoch in enumerate(milestones):
            at = math.ceil(epoch * num_train)
            assert rate(at - 1) == pytest.approx(0.05 * 0.1**number)
            assert rate(at) == pytest.approx(0.05 * 0.1 ** (number + 1))


def test_a_milestone_within_the_warm_up_is_not_dropped() -> None:
    for overrides in (
        ["schedule.milestones=[3, 9]", "schedule.warmup=5"],
        ["schedule.milestones=[3]", "schedule.warmup=20"],
    ):
        with pytest.raises(ConfigError):
            rates("schedule.shape=step", *overrides)


@pytest.mark.parametrize("kind", ["gradual", "constant", "none"])
def test_warm_ups(kind: str) -> None:
    """4 epochs from a quarter of the peak: linear up to the next step, constant, or none."""
    overrides = [
        f"schedule.warmup_kind={kind}",
        "schedule.warmup=4",
        "schedule.warmup_from=0.25",
        "schedule.shape=constant",
    ]
    config = read_config("digits", [f"epochs={EPOCHS}", *overrides]).resolved(1)
    rate = learning_rate(config, N)
    for seen in range(0, EPOCHS * N, 64):
        risen = {
            "gradual": min(1.0, (seen + 64) / (4 * N)),
            "constant": float(seen >= 4 * N),
            "none": 1.0,
        }[kind]
        assert rate(seen) == pytest.approx(0.05 * (0.25 + 0.75 * risen))
