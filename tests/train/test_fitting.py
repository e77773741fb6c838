"""Keys that must fit each other, beside those of test_prepare: nets with options, milestones of stretched runs."""

import pytest

from allstep.errors import ConfigError
from allstep.train import RECIPES, read_config
from allstep.train.fitting import check_config
from allstep.train.rate import learning_rate


def test_an_option_that_a_net_of_ours_does_not_take_is_told_before_the_start() -> None:
    with pytest.raises(ConfigError, match="model small-cnn has no option 'width'; did you mean 'widths'"):
        check_config(read_config("digits", ["model.options.width=[8]"]), 2)
    with pytest.raises(ConfigError, match="the net's name says that it is 20, leave it out"):
        check_config(read_config("digits", ["model.name=cifar-resnet20", "model.options.depth=8"]), 2)
    for recipe in RECIPES.values():
        check_config(recipe(), 2)


def test_milestones_move_with_a_run_that_keeps_its_updates() -> None:
    """4 times the batch in 4 times the epochs: milestone 15 of 20 is at epoch 60 of 80, and 30 would never come."""
    words = ["epochs=20", "batch=256", "schedule.keep_updates=true", "schedule.shape=step", "schedule.warmup=0"]
    config = read_config("digits", [*words, "schedule.milestones=[15]"])
    check_config(config, 2)
    assert config.num_epochs == 80
    rate = learning_rate(config, 1000)
    assert rate(59_000) == pytest.approx(10 * rate(61_000)) == pytest.approx(rate(0))
    with pytest.raises(ConfigError, match=r"epoch 30 never comes, the run has 20: write schedule.milestones=\[15\]"):
        check_config(read_config("digits", [*words, "schedule.milestones=[15, 30]"]), 2)
