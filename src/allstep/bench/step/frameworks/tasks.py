"""What `allstep bench step --framework` trains, and with which libraries.

This module imports no framework: the bench itself runs without one, and each worker imports only
its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from allstep.errors import ConfigError

BRIDGE = "bridge alone"
TAPE, TRAINER = "DistributedGradientTape", "DistributedTrainer"
MIRRORED = "MultiWorkerMirrored"
DATA_PARALLEL = "Keras DataParallel"


@dataclass(frozen=True)
class Task:
    """A model to train. `shape` of an image is (height, width, channels).

    `has_norms`: whether it has batch norms. A peer may compute their means over all ranks, so its
    losses differ from ours.
    """

    batch: int
    shape: tuple[int, ...]
    num_classes: int
    num_parameters: int
    has_norms: bool = False


TASKS: Mapping[str, Task] = {
    "cnn": Task(32, (28, 28, 1), 10, 421_642),
    "resnet18": Task(64, (32, 32, 3), 10, 11_173_962, has_norms=True),
    "dense": Task(32, (28, 28, 1), 1000, 57_959_656),
}


@dataclass(frozen=True)
class Framework:
    """A front-end to measure.

    `packages`: the modules to import, with the name to install. `backend`: of Keras; empty without
    Keras. `peer`: the library to compare with, or empty.
    """

    packages: Mapping[str, str]
    backend: str = ""
    peer: str = ""
    models: tuple[str, ...] = tuple(TASKS)


_KERAS = {"keras": "keras"}
_TENSORFLOW = {"tensorflow": "tensorflow"}
FRAMEWORKS: Mapping[str, Framework] = {
    "keras-torch": Framework(_KERAS, "torch"),
    "keras-tensorflow": Framework(_KERAS | _TENSORFLOW, "tensorflow", MIRRORED),
    "keras-jax": Framework(_KERAS | {"jax": "jax"}, "jax", DATA_PARALLEL),
    "tensorflow": Framework(_KERAS | _TENSORFLOW, "tensorflow", MIRRORED),
    "mxnet": Framework({"mxnet": "mxnet"}, models=("cnn", "dense")),
}


def framework_of(name: str) -> Framework:
    """Return the framework of this name; raise ConfigError if it is unknown or not installed."""
    if name not in FRAMEWORKS:
        raise ConfigError(
            f"--framework {name!r}: no such framework; choose one of torch, {', '.join(FRAMEWORKS)}"
        )
    for module, package in FRAMEWORKS[name].packages.items():
        if not find_spec(module):
            raise ConfigError(
                f"--framework {name} needs {package}, which is not installed: pip install {package}"
            )
    return FRAMEWORKS[name]


def task_of(framework: str, model: str) -> Task:
    """Return the task of this name; raise ConfigError if the framework has none."""
    models = framework_of(framework).models
    if model not in models:
        raise ConfigError(
            f"--model {model!r}: no such model for --framework {framework}; choose one of"
            f" {', '.join(models)}"
        )
    return TASKS[model]
