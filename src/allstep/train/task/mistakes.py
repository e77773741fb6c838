"""The confusion matrix of an evaluation, and the worst mistakes with their images.

Each rank collects them during an evaluation; then rank 0 writes them.

```
rank 0 ─ counts[label][predicted], its worst mistakes ─┐  counts added, the worst   rank 0 writes
rank 1 ─ the same for its share                       ─┴─ of all sent as PNGs   ──> RUN/mistakes/
```

A mistake is worse, the higher the probability that the model gave to the wrong class.
docs/report.md describes the files. They are consistent at any moment: first the list is removed,
then the images are replaced, each by a rename, and at last the new list is written.

The counts are written in full: 2 MB for 1,000 classes, of which the report shows the most frequent
ones. With more than 2,000 classes there is no matrix, because it would need too much memory on each
rank.
"""

import heapq
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from PIL import Image

from allstep.comm.group import agree
from allstep.files.atomic import PART, replace_file
from allstep.world import World

FOLDER = "mistakes"
_MAX_CLASSES = 2000
# Bytes of a PNG, so that a page with all images can be sent by mail.
_MAX_NBYTES = 40_000
_LIST, _MATRIX = "mistakes.json", "confusion.json"


@dataclass(frozen=True)
class Mistake:
    """A sample that the model assigned to a wrong class."""

    probability: float
    """The probability that the model gave to `predicted`."""
    number: int
    """The number of the sample in its dataset."""
    label: int
    predicted: int
    image: NDArray[Any] | None
    """(height, width, channels) as prepared for the model, before normalization.

    None if samples are not images.
    """

    @property
    def order(self) -> tuple[float, int]:
        """The sort key: the worst mistake has the smallest.

        The sample's number decides between equal probabilities, so that any number of workers finds
        the same mistakes.
        """
        return -self.probability, self.number


class Mistakes:
    """The mistakes of one evaluation, collected batch by batch.

    `classes` are the names of the classes; a class without a name is named by its number. `keep` is
    the number of mistakes to keep.
    """

    def __init__(self, classes: Sequence[str], keep: int = 24) -> None:
        self.classes, self.keep = tuple(classes), keep
        self.worst: list[Mistake] = []
        """The worst mistakes of this rank, the worst one first."""
        self.counts = np.zeros((0, 0), np.int64)
        """The confusion matrix of this rank's share: counts[label][predicted]."""

    def add(
        self,
        data: torch.Tensor,
        samples: NDArray[np.int64],
        logits: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """Count a batch: its images, sample numbers, logits and classes."""
        probability, predicted = logits.detach().softmax(1).max(1)
        rows = (
            torch.stack((probability.double(), predicted.double(), target.double())).cpu().numpy()
        )
        likely, taken, labels = rows[0], rows[1].astype(np.int64), rows[2].astype(np.int64)
        self._count(labels, taken, logits.shape[1])
        for row in self._candidates(likely, taken != labels, samples):
            number, label, wrong = int(samples[row]), int(labels[row]), int(taken[row])
            self.worst.append(Mistake(float(likely[row]), number, label, wrong, _image(data[row])))
        self.worst = heapq.nsmallest(self.keep, self.worst, key=lambda mistake: mistake.order)

    def write(self, folder: Path, world: World) -> str | None:
        """Combine the ranks' mistakes and write `folder`/mistakes on rank 0. A collective.

        Return a message if the files cannot be written; else None.
        """
        counts = self._all_counts(world)
        entries = self._all_worst(world)
        if world.rank != 0:
            return None
        try:
            _write(folder / FOLDER, self._named(len(counts)), counts, entries)
        except OSError as error:
            return f"the mistakes of this evaluation could not be written to {FOLDER}/: {error}"
        return None

    def _count(
        self, labels: NDArray[np.int64], predicted: NDArray[np.int64], num_classes: int
    ) -> None:
        if num_classes <= _MAX_CLASSES:
            self._grow(max(num_classes, len(self.classes)))
            np.add.at(self.counts, (labels, predicted), 1)

    def _grow(self, size: int) -> None:
        more = max(0, min(size, _MAX_CLASSES) - len(self.counts))
        self.counts = np.pad(self.counts, (0, more)) if more else self.counts

    def _candidates(
        self, likely: NDArray[np.float64], wrong: NDArray[np.bool_], samples: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the rows of a batch that may be among the worst, so that only these are copied."""
        rows = np.flatnonzero(wrong & np.isfinite(likely))
        if len(self.worst) == self.keep:
            rows = rows[likely[rows] >= self.worst[-1].probability]
        return rows[np.lexsort((samples[rows], -likely[rows]))][: self.keep]

    def _all_counts(self, world: World) -> NDArray[np.int64]:
        """Return the sum of all ranks' counts on rank 0.

        A rank without samples does not know the number of classes, so the ranks exchange it first.
        """
        self._grow(max(agree.gather(world, len(self.counts))))
        sums = torch.from_numpy(self.counts.copy())
        if sums.numel():
            dist.reduce(sums, 0)
        return sums.numpy()

    def _all_worst(self, world: World) -> list[dict[str, Any]]:
        """Return the worst mistakes of all ranks, each with its PNG.

        Ranks send only the images of these mistakes.
        """
        orders = agree.gather(world, [mistake.order for mistake in self.worst])
        chosen = set(heapq.nsmallest(self.keep, chain.from_iterable(orders)))
        mine = [
            (mistake.order, self._entry(mistake))
            for mistake in self.worst
            if mistake.order in chosen
        ]
        everyone = chain.from_iterable(agree.gather(world, mine))
        return [entry for _, entry in sorted(everyone, key=lambda pair: pair[0])]

    def _entry(self, mistake: Mistake) -> dict[str, Any]:
        names = self._named(max(mistake.label, mistake.predicted) + 1)
        return {
            "label": names[mistake.label],
            "predicted": names[mistake.predicted],
            "probability": round(mistake.probability, 6),
            "number": mistake.number,
            "png": None if mistake.image is None else to_png(mistake.image),
        }

    def _named(self, size: int) -> tuple[str, ...]:
        return self.classes[:size] + tuple(map(str, range(len(self.classes), size)))


def to_png(pixels: NDArray[Any], max_nbytes: int = _MAX_NBYTES) -> bytes:
    """Return an image (height, width, channels) as a PNG, reduced to at most `max_nbytes` bytes."""
    image = Image.fromarray(_visible(pixels))
    while True:
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True)
        if len(file.getvalue()) <= max_nbytes or max(image.size) <= 1:
            return file.getvalue()
        factor = min(0.9, (max_nbytes / len(file.getvalue())) ** 0.5)
        image = image.resize(
            (max(1, int(image.width * factor)), max(1, int(image.height * factor))),
            Image.Resampling.BOX,
        )


def _image(data: torch.Tensor) -> NDArray[Any] | None:
    """Return a copy of one sample, (channels, height, width) or (height, width), channels last.

    It is a copy because the loader reuses the memory of a batch. None if it is not an image.
    """
    if data.ndim == 2:
        data = data[None]
    return data.permute(1, 2, 0).cpu().numpy().copy() if data.ndim == 3 else None


def _visible(image: NDArray[Any]) -> NDArray[np.uint8]:
    """Return bytes: grey (height, width) or color (height, width, 3).

    Floats have no fixed scale: the minimum becomes black, the maximum white.
    """
    if image.dtype != np.uint8:
        floats = np.nan_to_num(image.astype(np.float64), posinf=0.0, neginf=0.0)
        low, high = floats.min(), floats.max()
        image = ((floats - low) * (255 / max(high - low, 1e-12))).round().astype(np.uint8)
    return np.ascontiguousarray(image[:, :, :3] if image.shape[2] >= 3 else image[:, :, 0])


def _write(
    folder: Path,
    classes: Sequence[str],
    counts: NDArray[np.int64],
    entries: Sequence[dict[str, Any]],
) -> None:
    # Do not replace files of the folder that a symbolic link points to.
    if folder.is_symlink():
        folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_LIST, _MATRIX):
        (folder / name).unlink(missing_ok=True)
    with_image = [entry for entry in entries if entry["png"] is not None]
    listed = []
    for position, entry in enumerate(with_image):
        name = f"{position:04}.png"
        replace_file(folder / name, entry["png"])
        listed.append(
            {"file": name, **{key: value for key, value in entry.items() if key != "png"}}
        )
    _remove_others(folder, {entry["file"] for entry in listed})
    if classes:
        replace_file(folder / _MATRIX, _json({"classes": list(classes), "counts": counts.tolist()}))
    replace_file(folder / _LIST, _json(listed))


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove further images of an earlier evaluation, and partial files of a killed process."""
    for file in [*folder.glob("[0-9][0-9][0-9][0-9].png"), *folder.glob(f".*{PART}")]:
        if file.name not in names:
            file.unlink(missing_ok=True)


def _json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
