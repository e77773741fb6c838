"""The loader delivers each sample once per epoch, from any position, at any number of ranks."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.data import Batch, Loader, Mixup, order
from allstep.data.augment.transform import Transform
from allstep.data.loading.pipeline import Machinery
from allstep.data.sources.arrays import ArraySource
from allstep.errors import ConfigError, DataError
from allstep.world import World, places
from support.array_sources import Arrays, Singly, noise_transform, sample_images

IMAGES = np.arange(400, dtype=np.uint8).reshape(100, 2, 2)
SIZES = st.integers(1, 12)


def world(rank: int, size: int) -> World:
    return places(["here"] * size)[rank]


def loader(n: int, batch: int, rank: int = 0, size: int = 1, **options: Any) -> Loader:
    return Loader(
        Arrays(IMAGES[:n]), batch=batch, world=world(rank, size), **{"seed": 5, **options}
    )


def merged(shares: list[Batch]) -> list[int]:
    """Return the global batch from the shares of all ranks."""
    assert len({(share.epoch, share.position) for share in shares}) == 1
    return [number for share in shares for number in share.samples.tolist()]


def samples(batches: Iterator[Batch]) -> list[int]:
    return [number for batch in batches for number in batch.samples.tolist()]


class TestTheStream:
    """Samples, epochs and positions of the batches, without loader workers."""

    @settings(max_examples=30)
    @given(n=st.integers(1, 60), batch=st.integers(1, 80), size=SIZES, epochs=st.integers(1, 3))
    def test_all_workers_together_see_what_one_sees(
        self, n: int, batch: int, size: int, epochs: int
    ) -> None:
        alone = list(loader(n, batch).batches(0, epochs * n))
        together = zip(
            *(loader(n, batch, rank, size).batches(0, epochs * n) for rank in range(size)),
            strict=True,
        )
        assert [merged(list(shares)) for shares in together] == [
            share.samples.tolist() for share in alone
        ]
        for epoch in range(epochs):
            assert sorted(samples(share for share in alone if share.epoch == epoch)) == list(
                range(n)
            )

    @settings(max_examples=30)
    @given(
        data=st.data(),
        n=st.integers(1, 60),
        batch=st.integers(1, 20),
        other=st.integers(1, 20),
        size=SIZES,
    )
    def test_resuming_at_any_position_with_any_batch_and_size_loses_nothing(
        self, data: st.DataObject, n: int, batch: int, other: int, size: int
    ) -> None:
        stop = 3 * n
        position = data.draw(st.integers(0, stop))
        whole = samples(loader(n, batch).batches(0, stop))
        before = samples(loader(n, batch).batches(0, position))
        resumed = zip(
            *(loader(n, other, rank, size).batches(position, stop) for rank in range(size)),
            strict=True,
        )
        assert before + [number for shares in resumed for number in merged(list(shares))] == whole

    def test_the_fields_of_a_batch_are_consistent(self) -> None:
        batches = list(loader(10, 4, rank=1, size=2).batches(10, 20))
        found = [(batch.epoch, batch.position, batch.weight) for batch in batches]
        assert found == [(1, 10, 2), (1, 14, 2), (1, 18, 1)]
        for batch in batches:
            assert batch.target.tolist() == batch.samples.tolist()
            assert torch.equal(batch.data, torch.from_numpy(IMAGES[batch.samples]))
            assert batch.data.dtype == torch.uint8
            assert batch.weight == len(batch.samples) == len(batch.data)

    @pytest.mark.parametrize("source", [Arrays, Singly])
    @pytest.mark.parametrize("transform", [None, noise_transform()])
    def test_a_share_may_be_empty(self, source: type[Arrays], transform: Transform | None) -> None:
        ranks = [
            Loader(source(sample_images(2)), transform, batch=2, world=world(rank, 4), workers=0)
            for rank in range(4)
        ]
        shares = [next(iter(each)) for each in ranks]
        assert sorted(share.weight for share in shares) == [0, 0, 1, 1]
        shape = (4, 4, 3) if transform is None else (3, 4, 4)
        assert all(share.data.shape == (share.weight, *shape) for share in shares)
        assert all(
            share.target.shape == (share.weight,) and share.target.dtype == torch.int64
            for share in shares
        )

    def test_without_a_seed_samples_keep_their_order(self) -> None:
        some = Loader(Arrays(IMAGES), batch=2, numbers=np.array([7, 3, 5]), seed=None)
        assert [batch.samples.tolist() for batch in some] == [[7, 3], [5]]

    def test_a_dataset_without_samples_has_no_batches(self) -> None:
        assert list(loader(0, 4)) == list(loader(0, 4).batches()) == []

    def test_whole_gives_each_worker_an_order_of_its_own(self) -> None:
        ranks = [loader(100, 20, rank, 2, partition="whole") for rank in range(2)]
        mine = [samples(iter(each)) for each in ranks]
        assert [len(numbers) for numbers in mine] == [50, 50]
        assert all(len(set(numbers)) == 50 for numbers in mine)
        # The two ranks share samples: they do not divide one common order.
        assert set(mine[0]) & set(mine[1])

    def test_byte_order_and_read_only_arrays_come_out_usable(self) -> None:
        images = IMAGES.astype(">i2")
        images.setflags(write=False)
        for source in (Arrays(images), Singly(images)):
            batch = next(iter(Loader(source, batch=5, seed=None)))
            assert torch.equal(batch.data, torch.from_numpy(IMAGES[:5].astype(np.int16)))
            batch.data.zero_()


class TestPosition:
    def test_each_loop_is_an_epoch_and_continues_from_the_position(self) -> None:
        ours = loader(10, 4)
        first = samples(iter(ours))
        assert (ours.position, len(ours)) == (10, 3)
        assert sorted(first) == list(range(10))
        second = samples(iter(ours))
        assert ours.position == 20
        assert first + second == samples(loader(10, 4).batches(0, 20))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_it_counts_what_was_delivered(self, workers: int) -> None:
        ours = Loader(
            Singly(sample_images(40)),
            noise_transform(),
            batch=4,
            workers=workers,
            kind="threads",
            seed=1,
        )
        seen = []
        for batch in ours:
            assert ours.position == batch.position + 4
            seen += batch.samples.tolist()
            if ours.position == 12:
                break
        state = ours.state_dict()
        assert state["position"] == 12
        other = Loader(
            Singly(sample_images(40)),
            noise_transform(),
            batch=7,
            workers=workers,
            kind="threads",
            seed=1,
        )
        other.load_state_dict(state)
        assert seen + samples(iter(other)) == samples(ours.batches(0, 40))

    @pytest.mark.parametrize("options", [{"n": 11}, {"seed": 6}, {"partition": "whole"}])
    def test_a_state_of_another_run_is_refused(self, options: dict[str, Any]) -> None:
        state = loader(10, 4).state_dict()
        with pytest.raises(DataError, match="this loader has"):
            loader(**{"n": 10, "batch": 4, **options}).load_state_dict(state)

    @settings(max_examples=20)
    @given(
        n=st.integers(1, 50),
        sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
        size=st.integers(1, 4),
    )
    def test_the_batch_may_change_after_any_batch(
        self, n: int, sizes: list[int], size: int
    ) -> None:
        by_rank = []
        for rank in range(size):
            ours = loader(n, sizes[0], rank, size)
            shares = []
            for number, batch in enumerate(ours):
                shares.append((batch.position, batch.samples.tolist()))
                ours.batch = sizes[(number + 1) % len(sizes)]
            by_rank.append(shares)
        numbers = [
            number for shares in zip(*by_rank, strict=True) for _, mine in shares for number in mine
        ]
        assert numbers == samples(loader(n, n).batches())

    def test_the_batch_may_change_while_workers_are_ahead(self) -> None:
        ours = Loader(
            Singly(sample_images(60)), noise_transform(), batch=4, workers=2, kind="threads"
        )
        weights = []
        for batch in ours:
            weights.append(batch.weight)
            ours.batch = 10
        assert weights == [4, 10, 10, 10, 10, 10, 6]

    @settings(max_examples=20)
    @given(data=st.data(), n=st.integers(1, 50), batch=st.integers(1, 20), size=st.integers(1, 4))
    def test_the_shares_may_change_after_any_batch(
        self, data: st.DataObject, n: int, batch: int, size: int
    ) -> None:
        weights = st.tuples(*[st.integers(1, 9)] * size)
        changes = data.draw(st.lists(weights, min_size=1, max_size=6))
        by_rank = []
        for rank in range(size):
            ours, found = loader(n, batch, rank, size, shares=changes[0]), []
            for number, share in enumerate(ours):
                found.append(share)
                ours.shares = changes[(number + 1) % len(changes)]
            by_rank.append(found)
        expected = [share.samples.tolist() for share in loader(n, batch).batches()]
        together = [list(shares) for shares in zip(*by_rank, strict=True)]
        assert [merged(shares) for shares in together] == expected
        for number, shares in enumerate(together):
            lengths = order.lengths(len(expected[number]), changes[number % len(changes)])
            assert [share.weight for share in shares] == lengths

    @pytest.mark.parametrize("workers", [0, 2])
    def test_the_shares_may_change_while_workers_are_ahead(self, workers: int) -> None:
        """The images are those of one rank: what was read ahead belongs to the old shares."""
        options: dict[str, Any] = {"workers": workers, "kind": "threads", "batch": 10}
        both = [
            Loader(Singly(sample_images(60)), noise_transform(), world=world(rank, 2), **options)
            for rank in range(2)
        ]
        pairs = []
        for pair in zip(*both, strict=True):
            pairs.append([(share.data.clone(), share.samples) for share in pair])
            weights = [(9, 1), (1, 9), (1, 1)][len(pairs) % 3]
            for each in both:
                each.shares = weights
        assert [[len(data) for data, _ in pair] for pair in pairs] == [
            *([5, 5], [1, 9], [5, 5]),
            *([9, 1], [1, 9], [5, 5]),
        ]
        alone = Loader(Singly(sample_images(60)), noise_transform(), batch=10, workers=0)
        for pair, whole in zip(pairs, alone, strict=True):
            assert torch.equal(torch.cat([data for data, _ in pair]), whole.data)
            assert np.concatenate([numbers for _, numbers in pair]).tolist() == list(whole.samples)

    def test_memory_is_for_the_largest_share_of_the_rank(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []
        layout = Machinery.layout
        monkeypatch.setattr(
            Machinery, "layout", lambda *args: (seen.append(args[1]), layout(*args))[1]
        )
        for rank, weights in ((0, (1, 1)), (0, (14, 1)), (1, (14, 1)), (1, (100, 1))):
            next(loader(100, 60, rank, 2, shares=weights).batches())
        assert seen == [30, 56, 4, 1]

    def test_batches_end_with_their_epoch_by_default(self) -> None:
        for position in (0, 3, 10, 13, 29):
            found = samples(loader(10, 4).batches(position))
            assert found == samples(loader(10, 4).batches(position, position // 10 * 10 + 10))
            assert len(found) == 10 - position % 10

    def test_a_loop_in_which_the_position_is_moved_ends(self) -> None:
        ours = loader(20, 4)
        for _ in ours:
            ours.position = 40
        assert ours.position == 40
        assert next(iter(ours)).epoch == 2


class TestOptions:
    def test_invalid_options_are_refused(self) -> None:
        source = Arrays(IMAGES)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({}, "neither"),
            ({"batch": 4, "batch_per_worker": 4}, "both"),
            ({"batch": 0}, "at least 1"),
            ({"batch": 4, "workers": -1}, "workers"),
            ({"batch": 4, "kind": "fibres"}, "kind"),
            ({"batch": 4, "ahead": 0}, "ahead"),
            ({"batch": 4, "partition": "half"}, "partition"),
            ({"batch": 4, "partition": "whole", "seed": None}, "seed"),
            ({"batch": 4, "numbers": np.array([100])}, "0 to 99"),
            (
                {"batch": 4, "numbers": np.arange(100) < 50},
                r"found a bool array of shape \(100,\); np.flatnonzero",
            ),
            ({"batch": 4, "numbers": [1.5, 2.5]}, "found a float64 array"),
            ({"batch": 4, "numbers": [[1, 2]]}, r"of shape \(1, 2\)"),
            ({"batch": 32.0}, "batch is a whole number, not 32.0"),
            ({"batch": "32"}, "batch is a whole number, not '32'"),
            ({"batch_per_worker": 1.5}, "batch_per_worker is a whole number"),
            ({"batch": 4, "seed": "a"}, "seed is a whole number"),
            ({"batch": 4, "shares": "speed"}, "only `allstep train` measures the workers"),
            ({"batch": 4, "shares": "fair"}, "shares='fair': expected 'even' or one positive"),
            ({"batch": 4, "shares": [3, 1]}, r"shares=\[3, 1\]: .* for the only worker"),
            ({"batch": 4, "shares": [0]}, r"shares=\[0\]: expected one whole number from 1"),
        ]
        for options, message in wrong:
            with pytest.raises(ConfigError, match=message):
                Loader(source, **options)

    def test_invalid_positions_are_refused(self) -> None:
        ours = loader(10, 4)
        for wrong in (-1, 0.5, "1"):
            with pytest.raises(ConfigError, match="position"):
                ours.position = wrong  # type: ignore[assignment]
            with pytest.raises(ConfigError, match="position"):
                ours.batches(wrong)  # type: ignore[arg-type]
        assert ours.position == 0

    def test_numpys_integers_mean_what_pythons_mean(self) -> None:
        whole = np.int64
        ours = Loader(Arrays(IMAGES), batch=whole(10), seed=whole(3))  # type: ignore[arg-type]
        other = Loader(Arrays(IMAGES), batch=10, seed=3)
        assert samples(iter(ours)) == samples(iter(other))
        found = samples(ours.batches(whole(100), whole(200)))  # type: ignore[arg-type]
        assert found == samples(other.batches(100, 200))
        assert type(ours.state_dict()["position"]) is type(ours.state_dict()["seed"]) is int
        size: Any = whole(10)
        per_worker = Loader(Arrays(IMAGES), batch_per_worker=size, seed=3)
        assert sorted(samples(iter(per_worker))) == list(range(100))

    def test_a_loader_leaves_the_transform_as_it_is(self) -> None:
        transform = Transform(batch=[Mixup(0.2)])
        sizes = (3, 5)
        loaders = [
            Loader(
                ArraySource(
                    sample_images(12), np.zeros(12, np.int64), classes=tuple("abcde"[:size])
                ),
                transform,
                batch=4,
            )
            for size in sizes
        ]
        assert [next(iter(each)).target.shape for each in loaders] == [(4, 3), (4, 5)]
        assert transform.num_classes is None

    def test_an_option_that_fits_no_sample_is_an_error_at_the_first_batch(self) -> None:
        floats = sample_images(50).astype(np.float32)
        for source in (Arrays(floats), Singly(floats)):
            with pytest.raises(
                ConfigError, match=r"images of uint8, found float32 arrays of shape \(4, 4, 3\)"
            ):
                next(iter(Loader(source, noise_transform(), batch=10)))
        with pytest.raises(
            ConfigError,
            match="no feature 'nix'; available further features: 'box', 'list', 'name'",
        ):
            next(iter(Loader(Arrays(IMAGES), batch=10, fields=["nix"])))

    def test_batch_per_worker_is_multiplied(self) -> None:
        assert Loader(Arrays(IMAGES), batch_per_worker=8, world=world(1, 3)).batch == 24

    def test_encoded_samples_need_a_transform_with_a_size(self) -> None:
        class Encoded(Singly):
            def read(self, number: int) -> Any:
                return type(super().read(number))(b"\xff\xd8", 0)

        for transform in (None, Transform()):
            with pytest.raises(ConfigError, match="RandomResizedCrop"):
                next(iter(Loader(Encoded(IMAGES), transform, batch=2)))

    def test_samples_of_different_shapes_do_not_stack(self) -> None:
        class Ragged(Singly):
            def read(self, number: int) -> Any:
                return type(super().read(number))(np.zeros((number + 1, 2)), 0)

        with pytest.raises(DataError, match=r"\(1, 2\), \(2, 2\)"):
            next(iter(Loader(Ragged(IMAGES), batch=4, seed=None)))

    def test_describe(self) -> None:
        threads = set(threading.enumerate())
        text = Loader(Arrays(IMAGES), batch=8, world=world(1, 3)).describe()
        assert "100 samples in batches of 8" in text
        assert "1 of 3" in text
        assert "no workers (arrays are only copied)" in text
        # `describe` starts no threads.
        assert set(threading.enumerate()) <= threads
