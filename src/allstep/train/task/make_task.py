"""The task of a run, from its config."""

from collections.abc import Sequence

from allstep.train.config.run_config import RunConfig
from allstep.train.task.classification import Classification
from allstep.train.task.task import Task


def make_task(config: RunConfig, classes: Sequence[str]) -> Task:
    """Return the task of a run; `classes` are the names of the classes of its data."""
    return Classification(len(classes), config.label_smoothing, classes, config.model)
