"""A source as a torch Dataset, for those who keep torch's own DataLoader.

    dataset = as_dataset(source, transform, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True, num_workers=2)
    for epoch in range(90):
        dataset.set_epoch(epoch)
        for data, target in loader: ...

The images are those of `Loader` with the same seed, bit for bit: random numbers belong to (seed,
epoch, sample), whoever draws them. The transform's batch part (mixup, normalisation) is left to the
caller: `transform.on_batch`. A bad sample is an error here, since a Dataset cannot skip one.
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
    """Samples by index:

    `(data, target)`, data as uint8 (channels, height, width), or the source's array without a
    transform.
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
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # seen by workers that live for many epochs
        self._image: Any = None

    def __len__(self) -> int:
        return len(self.source) if self.numbers is None else len(self.numbers)

    @property
    def epoch(self) -> int:
        """Which epoch's random numbers the images have."""
        return int(self._epoch.item())

    def set_epoch(self, epoch: int) -> None:
        """From now on the images of that epoch, in all worker processes; call it between two
        epochs."""
        self._epoch[0] = epoch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"the dataset has samples 0 to {len(self) - 1}, not {index}")
        number = index if self.numbers is None else int(self.numbers[index])
        sample = self.source.read(number)
        target = (
            sample.target
            if not isinstance(sample.target, np.ndarray)
            else torch.from_numpy(sample.target)
        )
        if self.transform is None:
            return torch.tensor(sample.data), target
        return self._made(self.transform, number, sample.data), target

    def _made(self, transform: Transform, number: int, data: Any) -> torch.Tensor:
        if self._image is None:
            self._image = fill.image_shape(transform, self.source.read(number))
        shape, dtype = self._image
        out = np.empty((1, *shape), dtype)
        try:
            transform.one(
                data, out[0], transform.draw(self.seed, self.epoch, np.array([number])), 0
            )
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
    """`source` with `transform` as a map-style Dataset; `set_epoch` before each epoch, `numbers`
    for some of the samples only."""
    return SourceDataset(source, transform, seed, numbers)
