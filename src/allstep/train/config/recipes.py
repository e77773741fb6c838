"""The ready-made runs. A recipe is a function that returns a config; the first line of its
docstring is what `allstep train --list` shows.

A recipe states every key in which it differs from the defaults of `RunConfig`, which are tuned for
no dataset. `tests/train/config/recipes.yaml` has all keys of all recipes: a changed default must
not change what a recipe trains.

Precision is `auto` in all of them, so the docstrings have accuracy and time for both. A time "from
one epoch" is that of one epoch on an otherwise quiet machine, times the epochs, and start and
evaluations as measured with it.
"""

from collections.abc import Callable, Mapping

from allstep.train.config.run_config import (
    NEUTRAL,
    DataConfig,
    EmaConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SaveConfig,
    ScheduleConfig,
)


def fashion_mnist() -> RunConfig:
    """A small fast model on Fashion-MNIST (60,000 images of clothes, 28x28): 93.87% of the test
    set, mean of 3 seeds (93.80 to 93.99).

    12 epochs, 2 workers of one thread on 2 cores; mirror images are scored with the images:

    bfloat16   93.87%, mean of 3 seeds   3.8 minutes, 16 November 2026, on a CPU that computes in it
    float32    93.87%, one seed          6.1 minutes, 17 November 2026, same kind of CPU, from one
    epoch (28.2 s; bfloat16: 15.0 s)
    """
    return RunConfig(
        recipe="fashion-mnist",
        epochs=12,
        batch=512,
        label_smoothing=0.1,
        data=DataConfig(
            name="fashion-mnist", augment="PadAndCrop(28, pad=2), Flip(alternating=True)"
        ),
        model=ModelConfig(
            name="speedy",
            options={"widths": [32, 64, 128]},
            norm="batch",
            norm_momentum=0.2,
            norm_scale=False,
        ),
        optimizer=OptimizerConfig(
            lr=1.0, base_batch=512, momentum=0.85, weight_decay=1e-3, bias_lr=16.0
        ),
        schedule=ScheduleConfig(shape="linear", warmup=2.5, warmup_from=0.2, end=0.07),
        evaluation=EvaluationConfig(flip=True),
        ema=EmaConfig(decay=0.98, every=1),
    )


def fashion_mnist_large() -> RunConfig:
    """LeNet on Fashion-MNIST, 30 epochs whatever the batch, for `allstep study batch`: 92.14% of
    the test set, mean of 3 seeds (batch 128).

    Batch 128, one worker of one thread; by batch and remedy: docs/studies.md.

    bfloat16   92.14%, mean of 3 seeds   6 minutes on a core, 16 November 2026, on a CPU that
    computes in it float32    92.38%, one seed          4.5 minutes, 17 November 2026, from one
    epoch alone (8.6 s; bfloat16: 6.0 s, so 3.3 minutes)
    """
    return RunConfig(
        recipe="fashion-mnist-large",
        epochs=30,
        batch=128,
        data=DataConfig(name="fashion-mnist"),
        model=ModelConfig(name="lenet", norm="batch", options={"widths": [16, 32], "hidden": 128}),
        optimizer=OptimizerConfig(lr=0.05, base_batch=128, weight_decay=5e-4),
        schedule=ScheduleConfig(shape="cosine", warmup=0.5),
    )


def cifar10() -> RunConfig:
    """A small fast model on CIFAR-10 (60,000 images of 10 things, 32x32): 93.51% of the test set,
    one seed.

    10 epochs, 2 workers of one thread on 2 cores; mirror images are scored with the images:

    bfloat16   93.51%, one seed          93 s an epoch, 17.5 minutes, on a CPU that computes in it
    float32    93.63%, one seed          168 s an epoch, about 28 minutes, on the same CPU

    Times of an epoch: 17 November 2026, one epoch each, one after the other, no other tests
    running.

    The settings are those of Jordan 2024 (https://arxiv.org/abs/2404.00498), without its lookahead.
    """
    return RunConfig(
        recipe="cifar10",
        epochs=10,
        batch=1024,
        label_smoothing=0.2,
        data=DataConfig(
            name="cifar10",
            validation=1000,
            augment='PadAndCrop(32, pad=2, mode="reflect"), Flip(alternating=True)',
        ),
        model=ModelConfig(name="speedy", norm="batch", norm_momentum=0.4, norm_scale=False),
        optimizer=OptimizerConfig(
            lr=1.5, base_batch=1024, momentum=0.85, weight_decay=1.33e-3, bias_lr=64.0
        ),
        schedule=ScheduleConfig(shape="linear", warmup=2.3, warmup_from=0.2, end=0.07),
        evaluation=EvaluationConfig(flip=True),
        ema=EmaConfig(decay=0.95, every=1),
    )


def imagenet() -> RunConfig:
    """ResNet-50 on ImageNet, 90 epochs with the settings of Goyal et al. 2017 (batch 8,192).

    No claim of accuracy: never run whole here.
    """
    return RunConfig(
        recipe="imagenet",
        epochs=90,
        batch=8192,
        data=DataConfig(
            name="imagenet",
            augment="RandomResizedCrop(224), Flip()",
            prepare="CentreCrop(224)",
            mean=(123.675, 116.28, 103.53),
            std=(58.395, 57.12, 57.375),
            num_classes=1000,
        ),
        model=ModelConfig(name="resnet50", norm="batch", options={"zero_last_norm": True}),
        optimizer=OptimizerConfig(lr=0.1, base_batch=256, weight_decay=1e-4),
        schedule=ScheduleConfig(shape="step", warmup=5, warmup_from=1 / 32),
        save=SaveConfig(seconds=900),
    )


def digits() -> RunConfig:
    """Small CNN on the 8x8 digits that come with allstep (1,797 images): 99.1% in bfloat16, 99.2%
    in float32, means of 3 seeds.

    2 workers of one thread on 2 cores, saving every 2 s, 17 November 2026:

    bfloat16   99.07%, mean of 3 seeds   15.3 s, on a CPU that computes in it
    float32    99.17%, mean of 3 seeds   15.9 s, same CPU
    """
    return RunConfig(
        recipe="digits",
        epochs=150,
        batch=64,
        data=DataConfig(name="digits"),
        model=ModelConfig(
            name="small-cnn", norm="none", options={"widths": [32, 64], "hidden": 64}
        ),
        optimizer=OptimizerConfig(lr=0.05, base_batch=64, weight_decay=5e-4),
        schedule=ScheduleConfig(shape="cosine", warmup=0.5),
        save=SaveConfig(seconds=2, epochs=None),
    )


RECIPES: Mapping[str, Callable[[], RunConfig]] = {
    "fashion-mnist": fashion_mnist,
    "fashion-mnist-large": fashion_mnist_large,
    "cifar10": cifar10,
    "imagenet": imagenet,
    "digits": digits,
}
BASES: Mapping[str, Callable[[], RunConfig]] = {NEUTRAL: RunConfig, **RECIPES}
"""What a config can start from."""
DEFAULT = "fashion-mnist"
SMALLEST = "digits"
"""Needs nothing but the package; taken when a recipe's data is nowhere to be found."""
