"""The section `data` of a config: the dataset, its splits, and the transforms of its images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from allstep.data.image.limit import MAX_PIXELS
from allstep.train.config.number_types import (
    Classes,
    Label,
    Loaders,
    Part,
    Pixels,
    Positive,
    Real,
    Seed,
    Whole,
)
from allstep.train.config.section import Section


class DataConfig(Section):
    """The dataset, its splits, and the transforms of its images."""

    name: str = ""
    """A named dataset (`allstep data get --list`), or any name for data of your own at `train`;
    the default is then the last component of that path."""
    folder: Path | None = None
    """Folder with the files of a named dataset; None searches the usual places."""
    train: str | None = None
    """Data of your own: a folder, pattern or file in a format that `open_source` reads, or
    "synthetic:1000x224x224"."""
    validation: Whole | str | None = None
    """Number of samples held out of the training data, or path of the validation data; None holds
    out 5,000, or a tenth of a small dataset."""
    test: Whole | str | None = None
    """Path of the test data, or number of samples held out for it; None uses the test split of a
    named dataset, else holds out as many as for validation."""
    split_seed: Seed = 0
    """Seed of the choice of held-out samples; not the run's seed, so that runs can be compared."""
    use: Part | None = None
    """Train on only so many of the training samples: a count, or a fraction such as 0.25 or 1/64.
    A smaller part is a subset of a larger one; validation and test stay. None uses all."""
    augment: str = "none"
    """Transform of an image in training: operations of `allstep.data.augment`, such as
    "PadAndCrop(32, pad=4), Flip()", or a preset."""
    prepare: str = "none"
    """Transform of an image in evaluation, such as "CentreCrop(224)"."""
    mix: str = "none"
    """Transform of a whole batch in training: "Mixup(0.2)", "Cutmix(1.0)"."""
    mean: tuple[Real, ...] | None = None
    """Mean of each channel (0 to 255) to subtract; None measures it on the training split."""
    std: tuple[Positive, ...] | None = None
    """Std of each channel, by which pixels are divided; None measures it on the training split."""
    labels_from: Label | None = None
    """Label of the first class in TFRecords; None is 1 if the feature is called image/class/label,
    as in ImageNet, else 0."""
    num_classes: Classes | None = None
    """Number of classes, if the data does not contain it."""
    workers: Loaders | Literal["auto"] = "auto"
    """Number of threads or processes of each rank that load images; "auto" measures."""
    strict: bool = False
    """Whether a bad sample ends the run; else it is skipped and listed in the run folder."""
    budget: Whole | None = None
    """Bad samples of a split that each worker may skip; None is 100, or 0.1% of a large dataset."""
    max_pixels: Pixels = MAX_PIXELS
    """Largest number of pixels of an image that is decoded; a larger image is a bad sample."""

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_place(cls, values: Any) -> Any:
        if (
            not isinstance(values, Mapping)
            or values.get("name")
            or not isinstance(values.get("train"), str)
        ):
            return values
        return {**values, "name": _place_name(values["train"])}


def _place_name(where: str) -> str:
    """Return the last component of a path without wildcards: "photos" for "photos/*.tar"."""
    parts = [part for part in where.split("/") if part.strip(".~") and not set(part) & set("*?[{")]
    return parts[-1].partition(":")[0] if parts else "data"
