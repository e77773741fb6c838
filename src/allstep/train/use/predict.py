"""What a trained model sees in images.

```
words ── find_images ──> files ── read, decode, prepare: a thread for each core ──> a batch ── model ── softmax ──> Prediction of each
files, folders, patterns                  └─ one that cannot be read: a Prediction with a problem
```

An image goes the way that the run's validation images went (`data.prepare`, mean and deviation,
the mirror image too where the run evaluates with it), so an image of the test set gets the classes
here that it got there. Where the run's images were arrays of one size, other images are
stretched to that size, and made grey where those were grey.
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

_MOST, _VALUES = 256, 6_000_000


@dataclass(frozen=True)
class Prediction:
    """What a model makes of an image: its classes, the likeliest first, each with its probability;
    or why it could not be read."""

    image: str
    classes: tuple[tuple[str, float], ...] = ()
    problem: str | None = None


def find_images(words: Sequence[str], left_out: Counter[str] | None = None) -> list[Path]:
    """The files that `words` name: a file, all images in and below a folder, or those that match
    a pattern.

    A word that names nothing stays what it is, so that it gets its line among the others.
    `left_out` counts the endings of files in folders that are not taken for images.
    """
    counted: Counter[str] = Counter() if left_out is None else left_out
    return [path for word in words for path in _named(word, counted)]


def _named(word: str, left_out: Counter[str]) -> list[Path]:
    path = expand_home(word)
    # Path's own tests raise where a folder above may not be entered.
    if os.path.isdir(path):  # noqa: PTH112
        return sorted(_in_folder(path, left_out)) or [path]
    if os.path.lexists(path):
        return [path]
    matches = (Path(match) for match in glob(str(path), recursive=True))  # noqa: PTH207  # Path's knows no absolute patterns
    return sorted(match for match in matches if match.is_file()) or [path]


def _in_folder(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Images in and below `folder`, and folders that may not be listed: each gets a line with the
    reason."""
    refused: list[Path] = []
    for here, inside, names in os.walk(
        folder, onerror=lambda error: refused.append(Path(error.filename))
    ):
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
    """For each of the files its `top` likeliest classes, in their order.

    Files are read as the iterator goes on.
    """
    if top < 1:
        raise ConfigError(f"--top: expected 1 or more, found {top}")
    at_once = num_at_once(trained.shape)
    with ThreadPoolExecutor(allowed_cores()) as pool:
        for begin in range(0, len(images), at_once):
            yield from _batch(
                trained, [Path(each) for each in images[begin : begin + at_once]], top, pool
            )


def num_at_once(shape: tuple[int, int, int]) -> int:
    """Images of a batch: no gradients are kept, so many fit."""
    return max(1, min(_MOST, _VALUES // math.prod(shape)))


def _batch(
    trained: Trained, files: Sequence[Path], top: int, pool: ThreadPoolExecutor
) -> Iterator[Prediction]:
    assert trained.prepare.shape is not None
    out = np.empty((len(files), *trained.prepare.shape), np.uint8)
    draws = trained.prepare.draw(0, 0, np.arange(len(files)))
    read = partial(_read, trained, out, draws)
    problems = list(pool.map(read, range(len(files)), files))
    good = drop_bad(out, [row for row, problem in enumerate(problems) if problem is not None])
    found = iter(_classes(trained, good, top))
    for file, problem in zip(files, problems, strict=True):
        if problem is None and not (likely := next(found)):
            problem = "what the net says of it is no number; did the run diverge?"
        yield (
            Prediction(str(file), problem=problem)
            if problem is not None
            else Prediction(str(file), likely)
        )


def _read(
    trained: Trained, out: NDArray[np.uint8], draws: Draws, row: int, file: Path
) -> str | None:
    """One image into its row; what was wrong with it, if something was."""
    if os.path.isdir(file):  # noqa: PTH112  # Path's raises where a folder above may not be entered
        may_list = os.access(file, os.R_OK | os.X_OK)
        return (
            f"no image in this folder ({', '.join(IMAGES)})"
            if may_list
            else os.strerror(errno.EACCES)
        )
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
    """Of images (n, height, width, channels); none where the model's logits are no numbers."""
    if not len(images):
        return []
    stored = torch.from_numpy(images).permute(0, 3, 1, 2)
    logits = outputs(trained.model, trained.to_input(stored), trained.config.evaluation.flip)
    likely = logits.double().softmax(1).topk(min(top, trained.num_classes))
    rows = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
    return [_pairs(trained, numbers, shares) for numbers, shares in rows]


def _pairs(
    trained: Trained, numbers: Sequence[int], shares: Sequence[float]
) -> tuple[tuple[str, float], ...]:
    if not all(map(math.isfinite, shares)):
        return ()
    return tuple(
        (trained.classes[number], share) for number, share in zip(numbers, shares, strict=True)
    )
