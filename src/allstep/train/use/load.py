"""The model of a run, ready to be used: without the run's data, without workers.

```
RUN/config.yaml ─────────────> which model, how it is laid out
RUN/checkpoints/<samples>/
  state.json, "pictures" ────> classes, shape, mean and std, what is done to an image
  weights.safetensors ───────> the model optimizer.safetensors ─────> the moving average of the
  weights instead, where the run keeps one: it is what the run evaluates
```

Taken is the newest checkpoint that is whole, or the one that was best on the validation part. A run
that is under way may be read, too: checkpoints appear and go as wholes. Synchronised and ghost
norms are plain ones in evaluation, so one process is enough for them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allstep.data.augment import Resize
from allstep.data.augment.parse import spelled
from allstep.data.augment.transform import Transform
from allstep.data.image.limit import MAX_PIXELS
from allstep.errors import CheckpointError, ConfigError
from allstep.train.checkpoint import files as checkpoint
from allstep.train.checkpoint.files import Snapshot
from allstep.train.checkpoint.names import name_of
from allstep.train.checkpoint.restore import with_weights
from allstep.train.config.run_config import RunConfig
from allstep.train.folder.read import Which, run_config
from allstep.train.health.checkpoint_state import check_used
from allstep.train.input.to_input import ToInput, make_to_input
from allstep.train.step import build


@dataclass(frozen=True)
class Found:
    """A run and the checkpoint that was chosen of it, as plain values and tensors: they can be sent
    to other workers."""

    folder: Path
    config: RunConfig
    path: Path
    """Of the checkpoint."""
    which: Which
    snapshot: Snapshot
    notes: tuple[str, ...] = ()
    """What the user should know: a line on each checkpoint that could not be used."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What an image must be like for this model; see `Splits.image_facts`."""
        facts: Mapping[str, Any] = self.snapshot.state["pictures"]
        return facts


@dataclass(frozen=True)
class Trained:
    """A model and all that one must know to show it an image."""

    model: nn.Module
    config: RunConfig
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """Channels, height and width of an image as the model is evaluated on it."""
    mean: tuple[float, ...]
    """Of each channel, from 0 to 255."""
    std: tuple[float, ...]
    prepare: Transform
    """From an encoded image or an array to (height, width, channels)."""
    to_input: ToInput
    """From a batch of those, channels first, to what the model takes, on its device."""
    samples: int
    """That the model was trained on."""
    which: Which
    notes: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)


def load_run(
    folder: Path | str, which: Which | None = None, device: str = "auto", trust: bool = False
) -> Trained:
    """The model of the run in `folder`: its last weights, or the best on the validation part; None:
    what the run itself would test.

    trust: execute the model code that the config names, also when the folder may be another
    person's (`train.config.trust`).

    Raises ConfigError or CheckpointError, each of one line, when there is no run, no checkpoint, or
    not one of this model.
    """
    return make_trained(find_run(folder, which, trust), make_device(device))


def find_run(folder: Path | str, which: Which | None = None, trust: bool = False) -> Found:
    """Reads config and checkpoint of the run in `folder`."""
    folder = Path(folder)
    config = run_config(folder, trust=trust)
    newest = checkpoint.newest(folder / "checkpoints", check_used)
    if newest.path is None or newest.snapshot is None:
        raise CheckpointError(_no_checkpoint(folder, newest.complaints))
    notes = tuple(f"not used: {complaint}" for complaint in newest.complaints)
    progress = newest.snapshot.state["standing"]
    if which is None:
        which = config.evaluation.weights if progress["best"] else "last"
    if which == "last" or progress["best_samples"] == newest.snapshot.samples:
        return Found(folder, config, newest.path, which, newest.snapshot, notes)
    if not progress["best"]:
        raise CheckpointError(
            f"{folder}: no weights are the best yet, the run has not been evaluated: take the last"
            " ones"
        )
    path = folder / "checkpoints" / name_of(progress["best_samples"])
    return Found(folder, config, path, which, _best(path), notes)


def _best(path: Path) -> Snapshot:
    """The checkpoint of the best weights. No other has them, so damage is an error."""
    try:
        snapshot = checkpoint.read(path)
        check_used(snapshot)
        return snapshot
    except CheckpointError as error:
        raise CheckpointError(
            f"the best weights cannot be read: {error}; --which last takes the newest ones"
        ) from error


def _no_checkpoint(folder: Path, complaints: Sequence[str]) -> str:
    if complaints:
        return (
            f"{folder}: none of its {len(complaints)} checkpoints is whole; the newest:"
            f" {complaints[0]}"
        )
    return (
        f"{folder}: has no checkpoint yet; the first one comes as config.yaml says under `save`, or"
        " with the end of the run"
    )


def make_device(name: str) -> torch.device:
    """Where to compute: auto, cpu or cuda."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device: expected auto, cpu or cuda, found {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: there is no GPU that torch could use here; auto takes what there is"
        )
    use_gpu = name != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


def make_trained(found: Found, device: torch.device) -> Trained:
    """The model of a run that was found, with its weights."""
    config, facts = found.config, found.facts
    # A run falls back to plain where a user's model needs it, and does not say so in its config:
    # plain suits any model.
    channels_last = config.execution != "plain" and ":" not in config.model.name
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    model = with_weights(_model(found).to(dtype), found.snapshot, str(found.path)).to(device).eval()
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    shape: tuple[int, int, int] = tuple(facts["shape"])
    to_input = make_to_input(facts["mean"], facts["std"], device, dtype, channels_last)
    _check_shape(model, to_input, shape, found.path)
    return Trained(
        model=model,
        config=config,
        classes=tuple(facts["classes"]),
        shape=shape,
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        prepare=image_transform(facts["prepare"], shape, config.data.max_pixels),
        to_input=to_input,
        samples=found.snapshot.samples,
        which=found.which,
        notes=(*found.notes, *_not_finite(model, found.path)),
    )


def _check_shape(
    model: nn.Module, to_input: ToInput, shape: tuple[int, int, int], path: Path
) -> None:
    """CheckpointError where the model does not take an image of the shape that the checkpoint has."""
    try:
        with torch.no_grad():
            model(to_input(torch.zeros((1, *shape), dtype=torch.uint8)))
    except Exception as error:  # whatever a user's model raises
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{path}: state.json: pictures.shape: the model does not take images of {list(shape)}"
            f" ({words})"
        ) from error


def _not_finite(model: nn.Module, path: Path) -> Iterator[str]:
    """A warning that names the first tensor with NaN or infinite values, if there is one.

    Such a model still has an accuracy: NaN is the largest of all logits, so the first class wins.
    """
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and (count := int((~tensor.isfinite()).sum())):
            yield (
                f"warning: {path}: {name} has {count:,} NaN or infinite values of "
                f"{tensor.numel():,}; the run diverged or the file is damaged, and what this model "
                "predicts means nothing"
            )
            return


@dataclass(frozen=True)
class _ImageFacts:
    """What a model is made for."""

    num_classes: int
    shape: tuple[int, int, int]


def _model(found: Found) -> nn.Module:
    """With weights that mean nothing yet, for images of the size that it was trained on."""
    channels, height, width = found.facts.get("trained_shape", found.facts["shape"])
    images = _ImageFacts(len(found.facts["classes"]), (channels, height, width))
    try:
        return build.build_model(found.config, images)
    except ConfigError as error:
        if ":" not in found.config.model.name:
            raise
        raise ConfigError(
            f"{error}; the net is the user's own: call this from the folder that the run was"
            " trained from"
        ) from error


def image_transform(
    text: str, shape: tuple[int, int, int], max_pixels: int = MAX_PIXELS
) -> Transform:
    """What `data.prepare` spells, for images of any size and kind.

    Where it does not end at a size, all images of the run had the one in `shape` (channels,
    height, width): others are stretched to it first.
    """
    channels, *size = shape
    made = spelled(text, channels=channels)
    if made.shape is None:
        made = Transform(Resize((size[0], size[1])), *made.operations, channels=channels)
    made.max_pixels = max_pixels
    return made
