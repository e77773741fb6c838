"""Keys that must fit each other: model options, milestones, warm-ups, ghost batches.

test_prepare has further combinations.
"""

import re

import pytest

from allstep.errors import ConfigError
from allstep.train import RECIPES, read_config
from allstep.train.config.check_config import check_config, notes
from allstep.train.step.learning_rate import learning_rate


def test_an_option_that_a_model_of_ours_does_not_take_is_reported_before_the_start() -> None:
    with pytest.raises(
        ConfigError, match="model small-cnn has no option 'width'; did you mean 'widths'"
    ):
        check_config(read_config("digits", ["model.options.width=[8]"]), 2)
    with pytest.raises(ConfigError, match="the model's name sets it to 20, leave it out"):
        check_config(
            read_config("digits", ["model.name=cifar-resnet20", "model.options.depth=8"]), 2
        )
    for recipe in RECIPES.values():
        check_config(recipe(), 2)


def test_milestones_move_with_a_run_that_keeps_its_updates() -> None:
    """4 times the batch in 4 times the epochs: milestone 15 of 20 is at epoch 60 of 80, and 30 is
    not reached."""
    overrides = [
        "epochs=20",
        "batch=256",
        "schedule.keep_updates=true",
        "schedule.shape=step",
        "schedule.warmup=0",
    ]
    config = read_config("digits", [*overrides, "schedule.milestones=[15]"]).resolved(1)
    check_config(config, 2)
    assert config.num_epochs == 80
    rate = learning_rate(config, 1000)
    assert rate(59_000) == pytest.approx(10 * rate(61_000)) == pytest.approx(rate(0))
    with pytest.raises(
        ConfigError,
        match=r"epoch 30 is not reached, the run has 20: write schedule.milestones=\[15\]",
    ):
        check_config(read_config("digits", [*overrides, "schedule.milestones=[15, 30]"]), 2)


STEP = ["epochs=20", "schedule.shape=step"]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            [*STEP, "schedule.milestones=[3, 9]", "schedule.warmup=5"],
            "epoch 3 is within the warm-up of 5 epochs",
        ),
        (
            [*STEP, "schedule.milestones=[5]", "schedule.warmup=5"],
            "epoch 5 is within the warm-up of 5 epochs",
        ),
        (
            [*STEP, "schedule.warmup=7"],
            r"none are given, so they are 1/3, .* epoch 6\.66667 is within the warm-up of 7",
        ),
        (
            ["epochs=4", "schedule.warmup=5"],
            r"a warm-up of 5 epochs is longer than the run, which has 4: write .*=0\.67",
        ),
        (
            ["schedule.shape=one-cycle", "schedule.warmup=2"],
            "schedule.warmup=2 and schedule.shape=one-cycle exclude each other",
        ),
        (["schedule.warmup=2", "schedule.shape=one-cycle"], "leave the warm-up out"),
    ],
)
def test_warm_ups_that_do_not_fit_are_reported_before_the_start(
    overrides: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        check_config(read_config("digits", overrides), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [*STEP, "schedule.milestones=[3, 9]", "schedule.warmup=5", "schedule.warmup_kind=none"],
        [*STEP, "schedule.milestones=[3, 9]", "schedule.warmup=2.9"],
        [
            *STEP,
            "schedule.milestones=[3]",
            "schedule.warmup=5",
            "schedule.keep_updates=true",
            "batch=256",
        ],
        ["epochs=4", "schedule.warmup=4"],
        ["epochs=4", "schedule.warmup=9", "schedule.warmup_kind=none"],
        ["schedule.shape=one-cycle"],
        ["schedule.shape=one-cycle", "schedule.warmup=0"],
        ["schedule.shape=one-cycle", "schedule.warmup=2", "schedule.warmup_kind=none"],
    ],
    ids=" ".join,
)
def test_warm_ups_that_fit(overrides: list[str]) -> None:
    config = read_config("digits", overrides).resolved(1)
    check_config(config, 2)
    assert learning_rate(config, 1000)(500) > 0


def test_the_warm_up_of_a_recipe_gives_way_to_a_short_run_and_is_noted() -> None:
    """12 epochs have 2.5 of warm-up: one epoch has the same fraction.

    A warm-up that fits, or that the user sets, does not change.
    """
    short = read_config("fashion-mnist", ["epochs=1"]).resolved(1)
    check_config(short, 2)
    assert short.warmup == pytest.approx(2.5 / 12)
    assert (
        "warm-up of 2.5 epochs is longer than the run, which has 1: it is 0.208 epochs here"
        in notes(short, 2, 1024)[0]
    )
    fits = read_config("fashion-mnist", ["epochs=3"]).resolved(1)
    assert (fits.warmup, notes(fits, 2, 1024)) == (2.5, [])
    with pytest.raises(
        ConfigError, match=r"a warm-up of 2\.5 epochs is longer than the run, which has 1"
    ):
        check_config(read_config("fashion-mnist", ["epochs=1", "schedule.warmup=2.5"]), 2)


@pytest.mark.parametrize(
    ("overrides", "num_workers", "expected"),
    [
        (
            ["batch=128"],
            3,
            (
                "does not divide the 43 samples that a worker computes at a time: they are cut into"
                " 1 group of 43"
            ),
        ),
        (["batch=80"], 2, "the 40 samples that .* into 1 group of 40"),
        (["batch=144", "accumulation=3"], 1, None),
        (["batch=241", "accumulation=2"], 1, "the 121 samples .* into 3 groups of 40 or 41"),
        (["batch=96"], 2, None),
        (["batch=96"], 1, None),
        (["batch=128", "model.norm=batch"], 1, None),
    ],
)
def test_ghost_batches_of_another_size_are_noted(
    overrides: list[str], num_workers: int, expected: str | None
) -> None:
    config = read_config("digits", ["model.norm=ghost", "model.ghost=48", *overrides]).resolved(1)
    check_config(config, num_workers)
    found = notes(config, num_workers, config.batch)
    assert len(found) == (expected is not None)
    if expected is not None:
        assert re.search(expected, found[0])


@pytest.mark.parametrize(
    ("overrides", "num_workers", "expected"),
    [
        (
            ["batch=128"],
            1,
            (
                "48 does not divide the 128 samples that each of 1 worker computes at a time: take"
                " .*=32 or 64"
            ),
        ),
        (["batch=128"], 2, "the 64 samples that each of 2 workers .*=32 or 64"),
        (["batch=240", "accumulation=2"], 1, "the 120 samples .*=40 or 60"),
        (["batch_per_worker=53"], 3, "the 53 samples .*=53, or another batch"),
    ],
)
def test_ghost_batches_that_do_not_divide_are_refused(
    overrides: list[str], num_workers: int, expected: str
) -> None:
    config = read_config("digits", ["model.norm=ghost", "model.ghost=48", *overrides])
    check_config(config)  # as long as the number of workers is unknown
    with pytest.raises(ConfigError, match=expected):
        check_config(config, num_workers)
