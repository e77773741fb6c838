"""Predictions of a trained model for image files.

```
patterns ── find_images ──> files ── read, decode, prepare ──> batch ── model, softmax ──┐
(or files,                           (a thread per core)                                 │
folders)                             └─ unreadable: a Prediction with a problem          │
                                                             a Prediction per file <─────┘
```

An image is processed like the validation images of the run (`data.prepare`, mean and std, the
mirrored image, too, if the run evaluates with it), so an image of the test split gets the same
classes as in the run. If the run's images were arrays of one size, other images are stretched to
that size, and converted to gray if those were gray.
"""

import errno
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from allstep.data.image.limit import MAX_NBYTES
from allstep.data.loading.fill import drop_bad
from allstep.data.random.draws import Draws
from allstep.data.sources.folder import IMAGES
from allstep.errors import ConfigError
from allstep.files.bounded import read_regular
from allstep.files.home import expand_home
from allstep.machine import allowed_cores
from allstep.train.score.evaluate import outputs
from allstep.train.use.load import Trained, load_run

__all__ = ["Prediction", "Trained", "find_images", "load_run", "num_at_once", "predict"]

_MAX_IMAGES, _MAX_VALUES = 256, 6_000_000
"""Limits of a batch: images, and values of their pixels."""


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image, or the reason why there are none."""

    image: str
    """Path of the image, as given."""
    classes: tuple[tuple[str, float], ...] = ()
    """Classes with their probabilities, the most probable first."""
    problem: str | None = None
    """Reason why there are no classes, else None."""


def find_images(patterns: Sequence[str], left_out: Counter[str] | None = None) -> list[Path]:
    """Return the files that `patterns` name.

    A pattern is a file, a folder (all images in and below it), or a glob pattern. A pattern without
    matches is returned as a path, so that it gets a prediction with a problem. `left_out` counts
    the endings of files in folders that are not images.
    """
    counted: Counter[str] = Counter() if left_out is None else left_out
    return [path for pattern in patterns for path in _matches(pattern, counted)]


def _matches(pattern: str, left_out: Counter[str]) -> list[Path]:
    """Return the files that one pattern names, or the pattern itself if there are none."""
    path = expand_home(pattern)
    # `Path.is_dir` raises if a parent folder may not be entered.
    if os.path.isdir(path):  # noqa: PTH112
        return sorted(_in_folder(path, left_out)) or [path]
    if os.path.lexists(path):
        return [path]
    # `Path.glob` does not accept absolute patterns.
    matches = (Path(match) for match in glob(str(path), recursive=True))  # noqa: PTH207
    return sorted(match for match in matches if match.is_file()) or [path]


def _in_folder(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Yield the images in and below `folder`, and the folders that may not be listed.

    Each of these folders gets a prediction with the reason.
    """
    refused: list[Path] = []
    walk = os.walk(folder, onerror=lambda error: refused.append(Path(error.filename)))
    for here, inside, names in walk:
        inside[:] = [name for name in inside if not name.startswith(".")]
        if links := sum((Path(here) / name).is_symlink() for name in inside):
            left_out["links to folders"] += links
        for name in (name for name in names if not name.startswith(".")):
            if (ending := Path(name).suffix.lower()) in IMAGES:
                yield Path(here) / name
            else:
                left_out[ending] += 1
    yield from refused


def predict(trained: Trained, images: Sequence[Path | str], top: int = 5) -> Iterator[Prediction]:
    """Yield a prediction for each of the image files, in their order.

    `top` is the number of classes of a prediction, the most probable first (default: 5). Files are
    read while the iterator advances. A file that cannot be read gets a prediction with a `problem`.
    """
    if top < 1:
        raise ConfigError(f"--top: expected 1 or more, found {top}")
    at_once = num_at_once(trained.shape)
    with ThreadPoolExecutor(allowed_cores()) as pool:
        for begin in range(0, len(images), at_once):
            files = [Path(each) for each in images[begin : begin + at_once]]
            yield from _batch(trained, files, top, pool)


def num_at_once(shape: tuple[int, int, int]) -> int:
    """Return the number of images per batch; many fit, because no gradients are kept."""
    return max(1, min(_MAX_IMAGES, _MAX_VALUES // math.prod(shape)))


def _batch(
    trained: Trained, files: Sequence[Path], top: int, pool: ThreadPoolExecutor
) -> Iterator[Prediction]:
    """Yield the predictions of a batch of files."""
    assert trained.prepare.shape is not None
    out = np.empty((len(files), *trained.prepare.shape), np.uint8)
    draws = trained.prepare.draw(0, 0, np.arange(len(files)))
    read = partial(_read, trained, out, draws)
    problems = list(pool.map(read, range(len(files)), files))
    good = drop_bad(out, [row for row, problem in enumerate(problems) if problem is not None])
    found = iter(_classes(trained, good, top))
    for file, problem in zip(files, problems, strict=True):
        if problem is None and not (likely := next(found)):
            problem = "the output of the model is not finite: the run may have diverged"
        yield Prediction(str(file), () if problem is not None else likely, problem)


def _read(
    trained: Trained, out: NDArray[np.uint8], draws: Draws, row: int, file: Path
) -> str | None:
    """Read one image into its row of `out`; return the problem, or None."""
    # `Path.is_dir` raises if a parent folder may not be entered.
    if os.path.isdir(file):  # noqa: PTH112
        may_list = os.access(file, os.R_OK | os.X_OK)
        empty = f"no image in this folder ({', '.join(IMAGES)})"
        return empty if may_list else os.strerror(errno.EACCES)
    try:
        trained.prepare.one(read_regular(file, MAX_NBYTES), out[row], draws, row)
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
    return None


@torch.inference_mode()
def _classes(
    trained: Trained, images: NDArray[np.uint8], top: int
) -> list[tuple[tuple[str, float], ...]]:
    """Return the classes of images (n, height, width, channels); () if logits are not finite."""
    if not len(images):
        return []
    stored = torch.from_numpy(images).permute(0, 3, 1, 2)
    logits = outputs(trained.model, trained.to_input(stored), trained.config.evaluation.flip)
    likely = logits.double().softmax(1).topk(min(top, trained.num_classes))
    rows = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
    return [_pairs(trained, numbers, probabilities) for numbers, probabilities in rows]


def _pairs(
    trained: Trained, numbers: Sequence[int], probabilities: Sequence[float]
) -> tuple[tuple[str, float], ...]:
    """Return names and probabilities of classes; () if a probability is not finite."""
    if not all(map(math.isfinite, probabilities)):
        return ()
    return tuple(
        (trained.classes[number], probability)
        for number, probability in zip(numbers, probabilities, strict=True)
    )
