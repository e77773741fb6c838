"""A source as a torch Dataset, for scripts that use torch's own DataLoader.

    dataset = as_dataset(source, transform, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2)
    for epoch in range(90):
        dataset.set_epoch(epoch)
        for data, target in loader: ...

The images equal those of `Loader` with the same seed, bit for bit: random numbers are a function
of (seed, epoch, sample) and do not depend on the process that draws them. The caller applies the
transform's batch operations (mixup, normalization): `transform.on_batch`. A bad sample raises
`BadSample`, since a Dataset cannot skip one.
"""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from allstep.data.augment.transform import Transform
from allstep.data.loading import fill
from allstep.data.loading.batch import images_first
from allstep.data.order import Numbers, some_of
from allstep.data.sources.source import BadSample, Source


class SourceDataset(Dataset[tuple[torch.Tensor, Any]]):
    """Map-style dataset whose samples are `(data, target)`.

    `data` is uint8 (channels, height, width), or the source's array if there is no transform.
    `as_dataset` explains the arguments.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform | None = None,
        seed: int = 0,
        numbers: Numbers | None = None,
    ) -> None:
        self.source, self.transform, self.seed = source, transform, seed
        self.numbers = None if numbers is None else some_of(numbers, len(source))
        self._epoch = torch.zeros(1, dtype=torch.int64)
        # Shared with DataLoader's persistent workers, which live for many epochs. torch's method
        # has no annotations.
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._image: Any = None

    def __len__(self) -> int:
        return len(self.source) if self.numbers is None else len(self.numbers)

    @property
    def epoch(self) -> int:
        """Return the epoch whose random numbers the transform uses."""
        return int(self._epoch.item())

    def set_epoch(self, epoch: int) -> None:
        """Use the random numbers of `epoch` from now on, in all worker processes.

        Call it between two epochs.
        """
        self._epoch[0] = epoch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"the dataset has samples 0 to {len(self) - 1}, not {index}")
        number = index if self.numbers is None else int(self.numbers[index])
        sample = self.source.read(number)
        target = sample.target
        if isinstance(target, np.ndarray):
            target = torch.from_numpy(target)
        if self.transform is None:
            return torch.tensor(sample.data), target
        return self._transformed(self.transform, number, sample.data), target

    def _transformed(self, transform: Transform, number: int, data: Any) -> torch.Tensor:
        if self._image is None:
            self._image = fill.image_shape(transform, self.source.read(number))
        shape, dtype = self._image
        out = np.empty((1, *shape), dtype)
        try:
            draws = transform.draw(self.seed, self.epoch, np.array([number]))
            transform.one(data, out[0], draws, 0)
        except ValueError as error:
            raise BadSample(number, self.source.place(number), str(error)) from error
        return images_first(out)[0]


def as_dataset(
    source: Source,
    transform: Transform | None = None,
    *,
    seed: int = 0,
    numbers: Numbers | None = None,
) -> SourceDataset:
    """Return `source` with `transform` as a map-style torch Dataset.

    `transform` None (the default) returns the source's arrays as they are. `seed` (default 0) keys
    the random numbers of the transform; call `set_epoch` before each epoch. `numbers` selects
    samples of the source by number (default: all).
    """
    return SourceDataset(source, transform, seed, numbers)
