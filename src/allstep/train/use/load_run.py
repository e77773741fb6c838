"""The model of a run, ready for use, without the run's data and without workers.

```
RUN/config.yaml ─────────────> which model, and its execution
RUN/checkpoints/<samples>/
  state.json, "pictures" ────> classes, shape, mean and std, preparation of an image
  weights.safetensors ───────> weights of the model
  optimizer.safetensors ─────> the EMA of the weights instead, if the run has one, because the run
                               evaluates the EMA
```

The checkpoint is the newest one that is whole, or the one with the best score on the validation
split. A running run can be read, too: checkpoints appear and disappear as a whole. Synchronized and
ghost norms are plain norms in evaluation, so one process is enough.
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
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.names import name_of
from allstep.train.checkpoint.restore import with_weights
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.config.run_config import RunConfig
from allstep.train.folder.existing_run import Which, run_config
from allstep.train.health.checkpoint_state import check_used
from allstep.train.input.to_input import ToInput, make_to_input
from allstep.train.step import build
from allstep.train.task.make_task import make_task


@dataclass(frozen=True)
class Found:
    """A run and one of its checkpoints, as plain values and tensors.

    It can be sent to other workers.
    """

    folder: Path
    config: RunConfig
    path: Path
    """Path of the checkpoint."""
    which: Which
    """Which weights the checkpoint has: last or best."""
    snapshot: Snapshot
    notes: tuple[str, ...] = ()
    """Notes for the user: one line about each checkpoint that could not be used."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the properties of an image for this model; see `Splits.image_facts`."""
        facts: Mapping[str, Any] = self.snapshot.state["pictures"]
        return facts


@dataclass(frozen=True)
class Trained:
    """A trained model, and everything that is needed to apply it to an image."""

    model: nn.Module
    config: RunConfig
    classes: tuple[str, ...]
    """Names of the classes; their numbers where they have no names."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image in evaluation."""
    mean: tuple[float, ...]
    """Mean of each channel, in levels from 0 to 255."""
    std: tuple[float, ...]
    """Std of each channel, in levels from 0 to 255."""
    prepare: Transform
    """Transform from an encoded image or an array to (height, width, channels)."""
    to_input: ToInput
    """Function from a batch of prepared images, channels first, to the model's input."""
    samples: int
    """Number of samples that the model was trained on."""
    which: Which
    """Which weights the model has: last or best."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as warnings about the weights."""

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.classes)


def load_run(
    folder: Path | str, which: Which | None = None, device: str = "auto", trust: bool = False
) -> Trained:
    """Return the trained model of the run in `folder`.

    - `which`: "last" weights, or those that were "best" on the validation split (default: the
      weights that the run itself would test)
    - `device`: "cpu", "cuda" or "auto" (a GPU if there is one)
    - `trust`: execute the model code that the config names, even if the folder may be another
      user's (`train.config.trust`)

    Raise ConfigError or CheckpointError, with a message of one line, if there is no run, no
    checkpoint, or none of this model.
    """
    return make_trained(find_run(folder, which, trust), make_device(device))


def find_run(folder: Path | str, which: Which | None = None, trust: bool = False) -> Found:
    """Read config and checkpoint of the run in `folder`; see `load_run`."""
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
            f"{folder}: has no best weights yet, because the run has not been evaluated: use the"
            " last ones"
        )
    path = folder / "checkpoints" / name_of(progress["best_samples"])
    return Found(folder, config, path, which, _best(path), notes)


def _best(path: Path) -> Snapshot:
    """Return the checkpoint of the best weights.

    No other checkpoint has them, so damage is an error.
    """
    try:
        snapshot = checkpoint.read(path)
        check_used(snapshot)
        return snapshot
    except CheckpointError as error:
        raise CheckpointError(
            f"the best weights cannot be read: {error}; --which last uses the newest ones"
        ) from error


def _no_checkpoint(folder: Path, complaints: Sequence[str]) -> str:
    """Return the error message about a run without a whole checkpoint."""
    if complaints:
        return (
            f"{folder}: none of its {len(complaints)} checkpoints is whole; the newest:"
            f" {complaints[0]}"
        )
    return (
        f"{folder}: has no checkpoint yet; the first one is written as `save` in config.yaml"
        " states, or at the end of the run"
    )


def make_device(name: str) -> torch.device:
    """Return the device of a name: auto, cpu or cuda; raise ConfigError for others."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device: expected auto, cpu or cuda, found {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no GPU on this host; auto uses what is available"
        )
    use_gpu = name != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


def make_trained(found: Found, device: torch.device) -> Trained:
    """Build the model of a run, and load its weights."""
    config, facts = found.config, found.facts
    # A run falls back to plain execution if a user's model needs it, which its config does not
    # state. Plain execution suits any model.
    channels_last = config.execution != "plain" and ":" not in config.model.name
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    model = with_weights(_model(found).to(dtype), found.snapshot, str(found.path)).to(device).eval()
    if channels_last:
        # The type stubs of torch lack this overload.
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
    """Raise CheckpointError if the model does not accept images of the checkpoint's shape."""
    try:
        with torch.no_grad():
            model(to_input(torch.zeros((1, *shape), dtype=torch.uint8)))
    except Exception as error:
        # A user's model may raise anything.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{path}: state.json: pictures.shape: the model does not accept images of {list(shape)}"
            f" ({reason})"
        ) from error


def _not_finite(model: nn.Module, path: Path) -> Iterator[str]:
    """Yield a warning that names the first tensor with NaN or infinite values, if there is one.

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
class _FactsOfRun:
    """What is known about the data of a run without opening it."""

    classes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def _model(found: Found) -> nn.Module:
    """Build the model with initial weights, for images of the size in training."""
    channels, height, width = found.facts.get("trained_shape", found.facts["shape"])
    facts = _FactsOfRun(tuple(found.facts["classes"]), (channels, height, width))
    try:
        return build.build_model(found.config, make_task(found.config, facts.classes), facts)
    except ConfigError as error:
        if ":" not in found.config.model.name:
            raise
        raise ConfigError(
            f"{error}; the model is code of the user: run this command in the folder that the run"
            " was trained from"
        ) from error


def image_transform(
    text: str, shape: tuple[int, int, int], max_pixels: int = MAX_PIXELS
) -> Transform:
    """Return the transform that `text` (`data.prepare`) describes, for images of any size and kind.

    If it has no fixed output size, all images of the run had that of `shape` (channels, height,
    width), so other images are stretched to it first.
    """
    channels, *size = shape
    made = spelled(text, channels=channels)
    if made.shape is None:
        made = Transform(Resize((size[0], size[1])), *made.operations, channels=channels)
    made.max_pixels = max_pixels
    return made
