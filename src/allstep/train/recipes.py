"""The ready-made runs. A recipe is a function that returns a config; its docstring is what `allstep train --list` shows."""

from collections.abc import Callable, Mapping

from allstep.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig


def fashion_mnist() -> RunConfig:
    """Small CNN on Fashion-MNIST (60,000 pictures of clothes, 28x28): 92% in 8 epochs, about a minute on 2 cores."""
    return RunConfig(
        recipe="fashion-mnist",
        epochs=8,
        batch=128,
        data=DataConfig(name="fashion-mnist"),
        model=ModelConfig(widths=(16, 32, 64), hidden=128),
        optimizer=OptimizerConfig(lr=0.1, base_batch=128, weight_decay=5e-4),
        schedule=ScheduleConfig(shape="cosine", warmup=0.5),
    )


def digits() -> RunConfig:
    """Small CNN on the 8x8 digits that come with allstep (1,797 pictures): 98% in a few seconds."""
    return RunConfig(
        recipe="digits",
        epochs=20,
        batch=64,
        data=DataConfig(name="digits"),
        model=ModelConfig(widths=(16, 32), hidden=64),
        optimizer=OptimizerConfig(lr=0.05, base_batch=64, weight_decay=5e-4),
        schedule=ScheduleConfig(shape="cosine", warmup=0.5),
    )


RECIPES: Mapping[str, Callable[[], RunConfig]] = {"fashion-mnist": fashion_mnist, "digits": digits}
DEFAULT = "fashion-mnist"
SMALLEST = "digits"
"""Needs nothing but the package; taken when a recipe's data is nowhere to be found."""
