"""The ready-made configs.

A recipe is a function that returns a config. `allstep train --list` shows the first line of its
docstring. A recipe states every key in which it differs from the defaults of `RunConfig`, which are
tuned for no dataset. `tests/train/config/recipes.yaml` has all keys of all recipes: a changed
default must not change what a recipe trains.

Precision is `auto` in all recipes, so the docstrings give accuracy and time for both precisions. A
time "from one epoch" is the time of one epoch on an otherwise idle machine, times the number of
epochs, plus the start and the evaluations that were measured with it.
"""

from collections.abc import Callable, Mapping

from allstep.train.config.data_config import DataConfig
from allstep.train.config.run_config import (
    NEUTRAL,
    EmaConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SaveConfig,
    ScheduleConfig,
)


def fashion_mnist() -> RunConfig:
    """A small fast model on Fashion-MNIST (60,000 images, 28x28): 93.87% test accuracy.

    The accuracy is the mean of 3 seeds (93.80 to 93.99). 12 epochs, 2 workers of one thread on 2
    cores; predictions are averaged with those for the mirror images:

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
    """LeNet on Fashion-MNIST, for `allstep study batch`: 92.14% test accuracy at batch 128.

    30 epochs with any batch. The accuracy is the mean of 3 seeds; for other batches and remedies
    see docs/studies.md. With batch 128, one worker of one thread:

    bfloat16   92.14%, mean of 3 seeds   6 minutes on a core, 16 November 2026, on a CPU that
                                         computes in it
    float32    92.38%, one seed          4.5 minutes, 17 November 2026, from one epoch (8.6 s;
                                         bfloat16: 6.0 s, so 3.3 minutes)
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
    """A small fast model on CIFAR-10 (60,000 images, 32x32): 93.51% test accuracy, one seed.

    10 epochs, 2 workers of one thread on 2 cores; predictions are averaged with those for the
    mirror images:

    bfloat16   93.51%, one seed          93 s an epoch, 17.5 minutes, on a CPU that computes in it
    float32    93.63%, one seed          168 s an epoch, about 28 minutes, on the same CPU

    Times of an epoch: 17 November 2026, one epoch each, one after the other, no other tests
    running. The settings are those of Jordan 2024 (https://arxiv.org/abs/2404.00498), without its
    lookahead.
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

    Its accuracy is not known: the complete run has not been measured.
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
    """A small CNN on the 8x8 digits that come with allstep (1,797 images): 99.1% test accuracy.

    In float32 99.2%; means of 3 seeds. 2 workers of one thread on 2 cores, a checkpoint every 2 s,
    17 November 2026:

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
"""The configs that a config can start from: the defaults and the recipes."""
DEFAULT = "fashion-mnist"
SMALLEST = "digits"
"""The recipe that needs no data besides the package; used if the default recipe's data is not
found."""
