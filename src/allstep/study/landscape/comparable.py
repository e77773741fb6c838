"""Whether two runs have the same model and input, so that a line between them has a meaning."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from allstep.data import Batch
from allstep.errors import ConfigError
from allstep.study.landscape.weights import differences
from allstep.train.score.evaluate import outputs
from allstep.train.use.load_run import Trained

_SHOWN = 4


def check_same_model(
    first: Trained, second: Trained, folders: Sequence[Path], batch: Batch
) -> None:
    """Raise ConfigError unless both runs have the same tensors, the same input and computation.

    The error names the tensors or keys that differ. `folders` are the runs' folders, `batch` has
    some samples, on which both models must compute the same with the weights of the second.
    """
    runs = f"{folders[0]} and {folders[1]}"
    found = differences(first.model.state_dict(), second.model.state_dict())
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(
            f"{runs} have different models: {'; '.join(found[:_SHOWN])}{more}; a line needs two"
            " runs of the same model"
        )
    if inputs := list(_input_differences(first, second)):
        raise ConfigError(
            f"{runs} prepare their images differently: {'; '.join(inputs)}; compare runs of the"
            " same data and split"
        )
    if not _compute_the_same(first, second, batch):
        options = [
            f"model.{key} {mine!r} and {theirs!r}"
            for (key, mine), (_, theirs) in zip(
                first.config.model, second.config.model, strict=True
            )
            if mine != theirs
        ]
        raise ConfigError(
            f"{runs} have the same tensors, but different models: with equal weights they compute"
            f" different outputs ({'; '.join(options) or 'the code of the model changed'}); a line"
            " needs two runs of the same model"
        )


def _input_differences(first: Trained, second: Trained) -> Iterator[str]:
    pairs = {
        "classes": (first.classes, second.classes),
        "shape": (first.shape, second.shape),
        "data.mean": (first.mean, second.mean),
        "data.std": (first.std, second.std),
        "data.prepare": (first.config.data.prepare, second.config.data.prepare),
        "evaluation.flip": (first.config.evaluation.flip, second.config.evaluation.flip),
    }
    for key, (mine, theirs) in pairs.items():
        if mine != theirs:
            yield f"{key} {_short(mine)} and {_short(theirs)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@torch.no_grad()
def _compute_the_same(first: Trained, second: Trained, batch: Batch) -> bool:
    """Return whether the first model computes what the second does, with the second's weights."""
    own = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    images = first.to_input(batch.data[:8])
    expected = outputs(second.model, images)
    first.model.load_state_dict(second.model.state_dict())
    try:
        return torch.allclose(outputs(first.model, images), expected, rtol=1e-3, equal_nan=True)
    finally:
        first.model.load_state_dict(own)
