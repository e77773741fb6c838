"""The loader's images: equal at any number of ranks and workers, in memory that is reused."""

import gc
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from allstep.data import Batch, Loader, Mixup, Normalize, augment
from allstep.data.augment.transform import Transform
from allstep.data.sources.arrays import ArraySource
from allstep.data.sources.source import Sample
from allstep.world import World, places
from support.array_sources import Arrays, Singly, noise_transform, noisy, sample_images


def world(rank: int, size: int) -> World:
    return places(["here"] * size)[rank]


def all_images(shares: list[list[Batch]]) -> torch.Tensor:
    return torch.cat([share.data for together in zip(*shares, strict=True) for share in together])


class TestImages:
    """Equal images at any number of ranks and threads. Reference: one rank, no threads."""

    @pytest.mark.parametrize("source", [Arrays, Singly])
    @pytest.mark.parametrize("workers", [0, 1, 2, 3])
    def test_any_number_of_ranks_and_threads_gives_the_same(
        self, source: type[Arrays], workers: int
    ) -> None:
        images = sample_images(53)
        alone = Loader(Singly(images), noise_transform(), batch=10, seed=3, workers=0)
        expected = torch.cat([batch.data for batch in alone.batches(7, 110)])
        for size in (1, 2, 3):
            options: dict[str, Any] = {
                "batch": 10,
                "seed": 3,
                "workers": workers,
                "kind": "threads",
            }
            ranks = [
                Loader(source(images), noise_transform(), world=world(r, size), **options)
                for r in range(size)
            ]
            shares = [list(each.batches(7, 110)) for each in ranks]
            assert torch.equal(all_images(shares), expected)

    def test_memory_is_channels_last_and_nothing_is_copied(self) -> None:
        batch = next(iter(Loader(Singly(sample_images(8)), noise_transform(), batch=8, workers=0)))
        assert batch.data.shape == (8, 3, 4, 4)
        assert batch.data.is_contiguous(memory_format=torch.channels_last)

    def test_a_transform_without_a_size_keeps_that_of_the_arrays(self) -> None:
        images = sample_images(6, 5, 7)
        batch = next(iter(Loader(Singly(images), Transform(channels=1), batch=6, seed=None)))
        assert torch.equal(batch.data, torch.from_numpy(images)[:, None])

    @pytest.mark.parametrize("workers", [0, 2])
    def test_the_batch_part_sees_what_is_left_of_a_batch(self, workers: int) -> None:
        def halve(
            data: torch.Tensor, target: torch.Tensor, draws: Any, stream: str
        ) -> tuple[torch.Tensor, torch.Tensor]:
            assert len(draws) == len(data)
            assert torch.equal(torch.from_numpy(draws.samples), target)
            return data.float() / 2, target

        transform = Transform(noisy, shape=(4, 4, 3), batch=[halve])
        source = Arrays(sample_images(20), bad=(3, 4, 11))
        ours = list(Loader(source, transform, batch=8, workers=workers, kind="threads"))
        plain = list(Loader(source, noise_transform(), batch=8, workers=0))
        for batch, other in zip(ours, plain, strict=True):
            assert torch.equal(batch.data, other.data.float() / 2)

    def test_fields_come_stacked_or_listed(self) -> None:
        ours = Loader(Arrays(sample_images(9)), batch=5, seed=None, fields=("name", "box", "list"))
        batch = next(iter(ours))
        assert batch.fields["name"] == [f"sample {i}" for i in range(5)]
        np.testing.assert_array_equal(batch.fields["box"], [[i, i + 1] for i in range(5)])
        assert batch.fields["list"] == [[], [0], [0, 1], [], [0]]

    def test_float_targets_stay_floats(self) -> None:
        targets = np.linspace(0, 1, 12, dtype=np.float32).reshape(6, 2)
        for source in (Arrays(sample_images(6), targets), Singly(sample_images(6), targets)):
            batch = next(iter(Loader(source, batch=4, seed=None)))
            assert torch.equal(batch.target, torch.from_numpy(targets[:4]))


class TestMemory:
    def test_a_batch_that_is_held_is_never_overwritten(self) -> None:
        """A batch may be held as a batch, a slice, an array or one image.

        Reference: the same loader, where each batch is copied immediately.
        """
        images = sample_images(400)

        def batches() -> Iterator[Batch]:
            return Loader(
                Singly(images), noise_transform(), batch=10, workers=2, kind="threads", ahead=2
            ).batches(0, 800)

        copies = [batch.data.clone() for batch in batches()]
        held: list[tuple[int, Any]] = []
        for number, batch in enumerate(batches()):
            view = (batch, batch.data[2:4], batch.data.numpy(), batch.data[1].numpy()[:, 1:])[
                number % 4
            ]
            if number % 3:
                held.append((number, view))
        del batch, view
        gc.collect()
        for number, view in held:
            data = view.data if isinstance(view, Batch) else view
            copy = (copies[number], copies[number][2:4], copies[number], copies[number][1][:, 1:])[
                number % 4
            ]
            assert torch.equal(torch.as_tensor(data), copy)

    def test_memory_is_used_again(self) -> None:
        ours = Loader(
            Singly(sample_images(400)), noise_transform(), batch=10, workers=2, kind="threads"
        )
        places = {batch.data.data_ptr() for batch in ours}
        assert len(places) <= ours._machinery().ahead + 3


class TestRealTransforms:
    """Equal images with real augmentations. Reference: one rank, no threads, single samples."""

    def jpegs(self, n: int) -> Singly:
        class Jpegs(Singly):
            def read(self, number: int) -> Sample:
                return Sample(encoded[number], number)

        smooth = [
            cv2.resize(small, (40 + 3 * i, 60), interpolation=cv2.INTER_CUBIC)
            for i, small in enumerate(sample_images(n))
        ]
        encoded = [cv2.imencode(".jpg", image)[1].tobytes() for image in smooth]
        return Jpegs(sample_images(n))

    @pytest.mark.usefixtures("processes")
    @pytest.mark.parametrize("kind", ["threads", "processes"])
    def test_jpegs(self, kind: Any) -> None:
        source = self.jpegs(30)
        transform = Transform(
            augment.RandomResizedCrop(24), augment.Flip(), augment.ColourJitter(0.2, 0.2, 0.2)
        )
        alone = Loader(source, transform, batch=8, seed=2, workers=0)
        expected = torch.cat([batch.data for batch in alone.batches(0, 60)])
        for size, workers in ((1, 2), (2, 1), (3, 1)) if kind == "threads" else ((2, 1),):
            options: dict[str, Any] = {"batch": 8, "seed": 2, "workers": workers, "kind": kind}
            shares = [
                list(Loader(source, transform, world=w, **options).batches(0, 60))
                for w in places(["here"] * size)
            ]
            assert torch.equal(all_images(shares), expected)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_small_images_at_once(self, workers: int) -> None:
        images, transform = (
            sample_images(1000, 32, 32, 3),
            Transform(augment.PadAndCrop(32), augment.Flip()),
        )
        one_by_one = Loader(Singly(images), transform, batch=300, seed=2, workers=0)
        at_once = Loader(
            ArraySource(images, np.arange(1000)), transform, batch=300, seed=2, workers=workers
        )
        assert "threads" in at_once.describe() or not workers
        for batch, other in zip(at_once, one_by_one, strict=True):
            assert torch.equal(batch.data, other.data)
            assert batch.target.tolist() == other.samples.tolist()

    def test_the_batch_part_of_empty_and_of_bad_shares(self) -> None:
        batch_part = [Mixup(0.2, num_classes=4), Normalize((0.45, 0.45, 0.45), (0.25, 0.25, 0.25))]
        transform = Transform(augment.Flip(), shape=(4, 4, 3), batch=batch_part)
        source = Singly(sample_images(4), np.arange(4), bad=(2,))
        shares = [
            next(iter(Loader(source, transform, batch=4, seed=None, world=world(rank, 6))))
            for rank in range(6)
        ]
        assert sorted(share.weight for share in shares) == [0, 0, 0, 1, 1, 1]
        for share in shares:
            assert (share.data.dtype, share.data.shape) == (torch.float32, (share.weight, 3, 4, 4))
            assert share.target.shape == (share.weight, 4)
