"""A source in torch's DataLoader gives the images of allstep's loader, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from allstep.data import Loader
from allstep.data.augment.transform import Transform
from allstep.data.loading.dataset import SourceDataset, as_dataset
from allstep.data.sources.source import BadSample
from allstep.errors import ConfigError
from support.array_sources import Arrays, noise_transform, sample_images


def by_number(dataset: SourceDataset, loader: Any, epoch: int) -> dict[int, torch.Tensor]:
    dataset.set_epoch(epoch)
    return {
        int(number): image
        for data, target in loader
        for number, image in zip(target, data, strict=True)
    }


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_gives_what_our_loader_gives(workers: int) -> None:
    """Two epochs, with persistent workers."""
    source = Arrays(sample_images(30))
    dataset = as_dataset(source, noise_transform(), seed=4)
    theirs = DataLoader(
        dataset, batch_size=7, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    ours = Loader(source, noise_transform(), batch=11, seed=4, workers=0)
    for epoch in range(2):
        found = by_number(dataset, theirs, epoch)
        assert sorted(found) == list(range(30))
        for batch in ours:
            for number, image in zip(batch.samples.tolist(), batch.data, strict=True):
                assert torch.equal(found[number], image)


def test_without_a_transform_arrays_come_as_they_are() -> None:
    images = sample_images(5)
    data, target = as_dataset(Arrays(images), numbers=np.array([3, 1]))[1]
    assert torch.equal(data, torch.from_numpy(images[1]))
    assert target == 1


def test_a_transform_without_a_size_keeps_the_arrays() -> None:
    images = sample_images(5, 6, 8)
    data, _ = as_dataset(Arrays(images), Transform(channels=1))[2]
    assert torch.equal(data, torch.from_numpy(images[2:3]))


def test_a_bad_sample_and_a_missing_index_are_errors() -> None:
    dataset = as_dataset(Arrays(sample_images(5), bad=(2,)), noise_transform())
    with pytest.raises(BadSample, match="sample 2"):
        dataset[2]
    with pytest.raises(IndexError, match="0 to 4, not 5"):
        dataset[5]


def test_a_mask_is_not_taken_for_numbers() -> None:
    with pytest.raises(ConfigError, match=r"np\.flatnonzero"):
        as_dataset(Arrays(sample_images(4)), numbers=np.arange(4) > 1)  # type: ignore[arg-type]
