"""What the model takes for what, and its worst mistakes with their images: collected on each rank
during an evaluation, then written.

```
rank 0 ─ counts[label][predicted], its worst mistakes ─┐  counts added, the worst of all chosen   rank 0 writes
rank 1 ─ the same for its share                       ─┴─ their images travel as PNGs         ─> RUN/mistakes/
```

A mistake is the worse the higher the probability that the model gave to the wrong class.
docs/report.md says what the files hold. They are whole at any moment: the list goes first, then the
images are replaced, each by a rename, and the new list comes last.

The counts are written in full: 1,000 classes are 2 MB, of which the page shows the most frequent.
Beyond 2,000 classes the matrix would cost each rank more memory than it is worth, and there is
none.
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
_MOST_CLASSES = 2000
_LARGEST = 40_000  # bytes of a PNG, so that a page with all of them can be sent by mail
_LIST, _MATRIX = "mistakes.json", "confusion.json"


@dataclass(frozen=True)
class Mistake:
    """An image that the model took for something else."""

    probability: float
    """What the model gave to `predicted`."""
    number: int
    """Of the sample."""
    label: int
    predicted: int
    image: NDArray[Any] | None
    """(height, width, channels) as the model sees it, before normalisation; None where samples are no
    images."""

    @property
    def order(self) -> tuple[float, int]:
        """The worst is the smallest; where two are equally bad the number decides, so that any
        number of workers finds the same."""
        return -self.probability, self.number


class Mistakes:
    """Collects the batches of one evaluation.

    `classes` are their names; more than there are names get their numbers.
    """

    def __init__(self, classes: Sequence[str], keep: int = 24) -> None:
        self.classes, self.keep = tuple(classes), keep
        self.worst: list[Mistake] = []
        """The worst first."""
        self.counts = np.zeros((0, 0), np.int64)
        """counts[label][predicted] of this rank's share."""

    def add(
        self,
        data: torch.Tensor,
        samples: NDArray[np.int64],
        logits: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """Counts a batch: its images, their numbers, what the model said, and the classes."""
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
        """Brings the ranks together and writes `folder`/mistakes on rank 0; every rank must call
        it. Says so if the disk did not let it."""
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
        if num_classes <= _MOST_CLASSES:
            self._grow(max(num_classes, len(self.classes)))
            np.add.at(self.counts, (labels, predicted), 1)

    def _grow(self, size: int) -> None:
        more = max(0, min(size, _MOST_CLASSES) - len(self.counts))
        self.counts = np.pad(self.counts, (0, more)) if more else self.counts

    def _candidates(
        self, likely: NDArray[np.float64], wrong: NDArray[np.bool_], samples: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Rows of a batch that may be among the worst: only their images are copied."""
        rows = np.flatnonzero(wrong & np.isfinite(likely))
        if len(self.worst) == self.keep:
            rows = rows[likely[rows] >= self.worst[-1].probability]
        return rows[np.lexsort((samples[rows], -likely[rows]))][: self.keep]

    def _all_counts(self, world: World) -> NDArray[np.int64]:
        """Of all ranks, on rank 0.

        A rank without samples has not heard how many classes there are.
        """
        self._grow(max(agree.gather(world, len(self.counts))))
        sums = torch.from_numpy(self.counts.copy())
        if sums.numel():
            dist.reduce(sums, 0)
        return sums.numpy()

    def _all_worst(self, world: World) -> list[dict[str, Any]]:
        """The worst of all ranks, each with its PNG.

        Only images of those that are chosen travel.
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


def to_png(pixels: NDArray[Any], largest: int = _LARGEST) -> bytes:
    """(height, width, channels) as a PNG of at most `largest` bytes: made smaller until it is."""
    image = Image.fromarray(_visible(pixels))
    while True:
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True)
        if len(file.getvalue()) <= largest or max(image.size) <= 1:
            return file.getvalue()
        factor = min(0.9, (largest / len(file.getvalue())) ** 0.5)
        image = image.resize(
            (max(1, int(image.width * factor)), max(1, int(image.height * factor))),
            Image.Resampling.BOX,
        )


def _image(data: torch.Tensor) -> NDArray[Any] | None:
    """A copy of one sample, (channels, height, width) or (height, width), with the channels last:
    batch memory is used again."""
    if data.ndim == 2:
        data = data[None]
    return data.permute(1, 2, 0).cpu().numpy().copy() if data.ndim == 3 else None


def _visible(image: NDArray[Any]) -> NDArray[np.uint8]:
    """As grey (height, width) or colour (height, width, 3) of bytes.

    Floats have no scale of their own: least is black, most white.
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
    # Files of a folder elsewhere must not be replaced.
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
    """Images of an earlier evaluation that had more of them, and what a kill left half written."""
    for file in [*folder.glob("[0-9][0-9][0-9][0-9].png"), *folder.glob(f".*{PART}")]:
        if file.name not in names:
            file.unlink(missing_ok=True)


def _json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
