"""From a small batch to a large one: the published recipe of Goyal et al. as the reference, and
what is said about it."""

from dataclasses import replace
from typing import Any

import pytest

from allstep.errors import ConfigError
from allstep.optim import Recipe, scale

IMAGENET = 1_281_167
GOYAL = Recipe(
    lr=0.1, batch=256, num_samples=IMAGENET, epochs=90, schedule="step", milestones=(30, 60, 80)
)
FASHION = Recipe(lr=0.1, batch=128, num_samples=60_000, epochs=30)


def test_goyals_recipe_at_8192() -> None:
    """0.1 -> 3.2 over 5 epochs, then 3.2, 0.32, 0.032, 0.0032 from epochs 30, 60 and 80 on."""
    rate = scale(GOYAL, 8192).recipe.rate()
    assert rate(0) == pytest.approx(0.1, abs=0.01)
    assert rate(2.5 * IMAGENET) == pytest.approx((0.1 + 3.2) / 2, abs=0.01)
    at = {
        5: 3.2,
        29.9: 3.2,
        30.1: 0.32,
        59.9: 0.32,
        60.1: 0.032,
        79.9: 0.032,
        80.1: 0.0032,
        90: 0.0032,
    }
    for epoch, expected in at.items():
        assert rate(epoch * IMAGENET) == pytest.approx(expected)


def test_the_words() -> None:
    assert str(scale(FASHION, 4096)).splitlines() == [
        "batch 128 -> 4096 (x32): 14062 updates become 439",
        "learning rate 0.1 -> 3.2 (linear rule: in proportion to the batch)",
        "warm-up from 0.1 to 3.2 over 5 epochs (73 updates)",
        "momentum 0.9 stays, without correction: torch has the learning rate outside of the momentum",
    ]
    assert scale(FASHION, 128).changes == (
        "nothing: 128 is the batch that the recipe was written for",
    )
    assert scale(FASHION, 128).recipe == FASHION


def test_rules() -> None:
    assert scale(FASHION, 512).recipe.lr == pytest.approx(0.4)
    assert scale(FASHION, 512, rule="square-root").recipe.lr == pytest.approx(0.2)
    assert scale(replace(FASHION, optimizer="lamb"), 512).recipe.lr == pytest.approx(0.2)
    unscaled = scale(FASHION, 512, rule="none").recipe
    assert (unscaled.lr, unscaled.warm_up) == (0.1, "none")


def test_as_many_updates_as_before() -> None:
    longer = scale(GOYAL, 1024, keep_updates=True)
    assert longer.recipe.num_updates == GOYAL.num_updates
    assert longer.recipe.milestones == (120, 240, 320)
    assert "epochs 90 -> 360, and the schedule with them, to keep the updates" in longer.changes


def test_warm_up() -> None:
    assert (
        scale(replace(FASHION, epochs=6), 1024).recipe.warm_up_epochs == 1.0
    )  # a sixth of a short run
    assert scale(FASHION, 1024, warm_up_epochs=2).recipe.warm_up_epochs == 2
    assert scale(FASHION, 1024, warm_up_epochs=0).recipe.warm_up == "none"
    assert scale(FASHION, 64).recipe.warm_up == "none"  # the rate falls
    assert (
        scale(replace(FASHION, schedule="one-cycle"), 1024).recipe.warm_up == "none"
    )  # has its own
    own = replace(FASHION, warm_up="gradual", warm_up_epochs=1.0)
    assert scale(own, 1024).recipe == replace(own, batch=1024, lr=0.8)
    early = replace(FASHION, schedule="step", milestones=(2, 20))
    assert scale(early, 1024).recipe.warm_up_epochs == 1.0


@pytest.mark.parametrize("rule", ["linear", "square-root", "none"])
@pytest.mark.parametrize("asked", [None, 2.0])
@pytest.mark.parametrize("start", [None, 0.0, 0.05, 0.1])
def test_no_warm_up_goes_down(start: float | None, asked: float | None, rule: str) -> None:
    """start: of the recipe's own warm-up, or None when it has none."""
    own = (
        FASHION
        if start is None
        else replace(FASHION, warm_up="gradual", warm_up_epochs=1.0, warm_up_from=start)
    )
    for batch in (16, 64, 127, 128, 256, 4096):
        scaled = scale(
            replace(own, schedule="constant"), batch, rule=rule, warm_up_epochs=asked
        ).recipe
        rate = scaled.rate()
        rates = [rate(seen) for seen in range(0, 330_000, 10_000)]
        assert rates == sorted(rates) and rates[-1] == scaled.lr
        assert asked in (None, scaled.warm_up_epochs)


def test_the_start_of_a_warm_up() -> None:
    own = replace(FASHION, warm_up="gradual", warm_up_epochs=1.0, warm_up_from=0.05)
    smaller = scale(own, 32)
    assert smaller.recipe.warm_up_from == pytest.approx(0.0125)  # in proportion, as the rate
    assert "warm-up from 0.0125 to 0.025 over 1 epochs (1875 updates)" in smaller.changes
    assert scale(own, 1024).recipe.warm_up_from == 0.05
    assert scale(FASHION, 64, warm_up_epochs=2).recipe.warm_up_from == 0.0


def test_the_same_batch() -> None:
    """What was asked for is done, or it is said why nothing had to be."""
    kept = scale(FASHION, 128, keep_updates=True)
    assert kept.recipe == FASHION
    assert kept.changes == (
        (
            "nothing: 128 is the batch that the recipe was written for, and its 14062 updates are"
            " kept as they are"
        ),
    )
    warm = scale(FASHION, 128, warm_up_epochs=3)
    assert warm.recipe == replace(FASHION, warm_up="gradual", warm_up_epochs=3)
    assert warm.changes == (
        "batch 128 and learning rate 0.1 stay: the recipe was written for them",
        "warm-up from 0 to 0.1 over 3 epochs (1406 updates)",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.0}, "learning rate 0.0 must be above 0"),
        ({"batch": 0}, "a batch of 0"),
        ({"batch": 70_000}, "a batch of 70000 from 60000 samples"),
        ({"epochs": 0}, "0 epochs"),
        ({"momentum": 1.0}, "momentum 1.0"),
        ({"milestones": (10,)}, 'belong to the schedule "step"'),
        ({"schedule": "step", "milestones": (40,)}, "before the end"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"warm_up": "slow"}, "known are: constant, gradual, none"),
        ({"warm_up_epochs": 31.0}, "a warm-up of 31.0 epochs"),
        (
            {"warm_up": "gradual", "warm_up_epochs": 1.0, "warm_up_from": 0.2},
            r"from 0\.2 to 0\.1 does not rise",
        ),
        ({"warm_up_from": -0.1}, r"from -0\.1 to 0\.1 does not rise"),
        (
            {"schedule": "one-cycle", "warm_up": "gradual", "warm_up_epochs": 2.0},
            "'one-cycle' has a warm-up of its own.*2 epochs to 0.1.*another schedule",
        ),
    ],
)
def test_recipes_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(FASHION, **options)


def test_what_cannot_be_scaled() -> None:
    unknown = replace(FASHION, batch=None)
    with pytest.raises(
        ConfigError, match=r"of the learning rate 0\.1 is unknown.*Recipe\(batch=\.\.\.\)"
    ):
        scale(unknown, 1024)
    assert unknown.rate()(0) == 0.1
    with pytest.raises(ConfigError, match="from 1 to the 60000 samples"):
        scale(FASHION, 60_001)
    with pytest.raises(ConfigError, match="'one-cycle' has a warm-up of its own"):
        scale(replace(FASHION, schedule="one-cycle"), 1024, warm_up_epochs=2)
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        scale(FASHION, 1024, rule="liner")
