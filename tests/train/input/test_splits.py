"""The data of a run, against references: splits against slow sets of numbers, mean and std against
numpy, batches against the images they hold.
"""

import io
import math
import subprocess
import sys
import tarfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.data import ArraySource, Loader, load, named_set, order
from allstep.data import find as find_set
from allstep.data.opening import open_source
from allstep.data.packing.pack import pack
from allstep.data.packing.shard_plan import Options
from allstep.data.sources import cifar, idx
from allstep.errors import ConfigError, DataError, UserError
from allstep.train.config.data_config import DataConfig
from allstep.train.config.run_config import RunConfig
from allstep.train.input.hold_out import hold_out, use_part
from allstep.train.input.images import _check_label
from allstep.train.input.loaders import make_sample_loader
from allstep.train.input.open_sources import Sources
from allstep.train.input.splits import (
    Splits,
    make_loaders,
    make_to_input,
    measure,
    open_splits,
)
from allstep.world import World, places
from support.image_folders import CLASSES, aged, encoded, make_folder

CPU = torch.device("cpu")


def config(batch: int = 8, overfit: int | None = None, seed: int = 0, **section: Any) -> RunConfig:
    data = DataConfig(**{"name": "mine", "workers": 0, **section})
    return RunConfig(recipe="mine", batch=batch, overfit=overfit, seed=seed, data=data)


def opened(**section: Any) -> Splits:
    return open_splits(config(**section))


def numbers(splits: Splits) -> list[list[int]]:
    """Return the sample numbers of each split."""
    three = (splits.train, splits.validation, splits.test)
    return [
        (np.arange(len(split)) if split.numbers is None else split.numbers).tolist()
        for split in three
    ]


def write_mnist(folder: Path, n: int = 40, labels: Any = None, *, test: int | None = 10) -> Path:
    """Write an idx dataset of n images of 6 x 5 in 4 classes, each of one level."""
    folder.mkdir(exist_ok=True)
    for prefix, count in (("train", n), ("t10k", test)):
        if count is not None:
            images, names = (f"{prefix}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
            idx.write(
                folder / images,
                np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((1, 6, 5), np.uint8),
            )
            idx.write(
                folder / names,
                np.asarray(np.arange(count) % 4 if labels is None else labels, np.uint8)[:count],
            )
    return folder


class TestParts:
    def test_a_named_set_is_split_as_it_always_was(self) -> None:
        """Reference: the dataset loaded by hand, and the permutation of earlier versions."""
        splits = opened(name="digits", split_seed=3)
        images = load(find_set(named_set("digits")))
        n, held_out = len(images.train), 143
        assert splits.train.numbers is not None
        assert (
            splits.train.numbers.tolist()
            == order.kept(np.arange(n - held_out), n, held_out, 3).tolist()
        )
        assert numbers(splits)[1] == sorted(order.held_out(n, held_out, 3).tolist())
        assert splits.test.numbers is None
        assert isinstance(splits.test.source, ArraySource)
        assert np.array_equal(splits.test.source.data, images.test.images)
        assert (splits.title, splits.shape, splits.classes) == (
            "8x8 digits",
            (1, 8, 8),
            tuple("0123456789"),
        )

    @given(
        n=st.integers(3, 300),
        share=st.tuples(st.floats(0, 1), st.floats(0, 1)),
        own_test=st.booleans(),
        seed=st.integers(0, 9),
    )
    def test_no_sample_is_in_two_parts_and_none_is_lost(
        self, n: int, share: tuple[float, float], own_test: bool, seed: int
    ) -> None:
        test = 1 + int(share[0] * (n - 3))
        validation = 1 + int(share[1] * (n - (0 if own_test else test) - 2))
        source = ArraySource(np.zeros((n, 2, 2), np.uint8), np.zeros(n, np.int64))
        section = DataConfig(
            name="mine", validation=validation, test=None if own_test else test, split_seed=seed
        )
        three = hold_out(section, Sources("", "", source, None, source if own_test else None))
        found = [[] if each.numbers is None else each.numbers.tolist() for each in three]
        everything = sorted(number for each in found for number in each)
        assert everything == list(range(n))
        assert [len(each) for each in found][1:] == [validation, 0 if own_test else test]
        again = hold_out(section, Sources("", "", source, None, source if own_test else None))
        assert all(np.array_equal(a.numbers, b.numbers) for a, b in zip(three, again, strict=True))  # type: ignore[arg-type]

    @given(
        n=st.integers(4, 300),
        parts=st.tuples(*2 * [st.fractions(Fraction(1, 400), 1, max_denominator=10**6)]),
        own=st.booleans(),
        seed=st.integers(0, 9),
    )
    def test_a_smaller_part_is_in_a_larger_one_and_the_other_splits_stay(
        self, n: int, parts: tuple[Fraction, Fraction], own: bool, seed: int
    ) -> None:
        """Reference: sets. Parts are given as fractions and as counts; all is the split itself."""
        source = ArraySource(np.zeros((n, 2, 2), np.uint8), np.zeros(n, np.int64))
        section = DataConfig(name="mine", split_seed=seed)
        other = source if own else None
        whole, *others = hold_out(section, Sources("", "", source, other, other))
        found = []
        for part in sorted(parts):
            count = math.floor(part * whole.num_samples)
            if count == 0:
                with pytest.raises(ConfigError, match="at least one"):
                    use_part(section.model_copy(update={"use": str(part)}), whole)
                return
            used = use_part(section.model_copy(update={"use": str(part) if part < 1 else 1}), whole)
            assert used.num_samples == count
            found.append(set(range(n) if used.numbers is None else used.numbers.tolist()))
            assert len(found[-1]) == count
            if count > 1:
                by_count = use_part(section.model_copy(update={"use": count}), whole)
                assert np.array_equal(by_count.numbers, used.numbers)  # type: ignore[arg-type]
        everything = set(range(n) if whole.numbers is None else whole.numbers.tolist())
        assert found[0] <= found[1] <= everything
        assert use_part(section.model_copy(update={"use": 1}), whole) is whole
        again = hold_out(
            section.model_copy(update={"use": 2}), Sources("", "", source, other, other)
        )
        for a, b in zip(others, again[1:], strict=True):
            assert np.array_equal(a.numbers, b.numbers)  # type: ignore[arg-type]

    def test_a_part_of_a_named_set(self) -> None:
        """1/64 is exact, and 0.1 is a tenth: in floating-point 0.1 * 1294 and 0.7 * 10 are not."""
        whole = opened(name="digits")
        sizes = {"1/64": 20, 0.1: 129, 0.5: 647, 500: 500, 1294: 1294, 1: 1294, None: 1294}
        for use, count in sizes.items():
            splits = opened(name="digits", use=use)
            assert (len(splits.train), splits.num_unused) == (count, 1294 - count)
            assert numbers(splits)[1:] == numbers(whole)[1:]
        assert numbers(opened(name="digits", use=1294)) == numbers(whole)
        # a sample of the set, not its first images: all classes within 20
        few = opened(name="digits", use=20)
        assert few.train.numbers is not None
        assert len(set(few.train.source.targets()[few.train.numbers].tolist())) >= 7

    def test_the_test_split_is_as_large_as_the_validation_split_by_default(self) -> None:
        splits = opened(train="synthetic:200x8x8", num_classes=3)
        assert [len(split) for split in (splits.train, splits.validation, splits.test)] == [
            160,
            20,
            20,
        ]
        splits = opened(train="synthetic:200x8x8", num_classes=3, validation=50)
        assert [len(split) for split in (splits.train, splits.validation, splits.test)] == [
            100,
            50,
            50,
        ]
        splits = opened(
            train="synthetic:200x8x8", num_classes=3, validation="synthetic:30x8x8", test=1
        )
        assert [len(split) for split in (splits.train, splits.validation, splits.test)] == [
            199,
            30,
            1,
        ]
        assert splits.num_classes == 3

    def test_folders_of_two_parts_have_their_test_part(self, tmp_path: Path) -> None:
        splits = opened(train=str(write_mnist(tmp_path / "mnist")))
        assert (len(splits.train), len(splits.validation), len(splits.test)) == (36, 4, 10)
        assert (splits.title, splits.classes, splits.shape) == ("mine", tuple("0123"), (1, 6, 5))
        rows = np.random.default_rng(0).integers(0, 10, (20, cifar.ROW), np.uint8)
        (tmp_path / "cifar").mkdir()
        for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
            rows.tofile(tmp_path / "cifar" / name)
        splits = opened(train=str(tmp_path / "cifar"))
        assert (len(splits.train), len(splits.validation), len(splits.test)) == (36, 4, 20)
        assert (splits.num_classes, splits.shape) == (10, (3, 32, 32))
        alone = write_mnist(tmp_path / "alone", test=None)
        assert len(opened(train=str(alone)).test) == 4

    def test_a_set_of_any_kind(self, tmp_path: Path) -> None:
        """The same images as class folders, TFRecords and tars have the same classes and sizes."""
        folder = make_folder(tmp_path / "photos", per_class=8)
        for kind in ("tfrecord", "tar"):
            pack(open_source(str(folder)), str(folder), tmp_path / kind, Options("photos", kind))
        sections = {
            "augment": "RandomResizedCrop((16, 20)), Flip()",
            "prepare": "CentreCrop((16, 20))",
            "test": 5,
        }
        for where in ("photos", "tfrecord", "tar"):
            splits = opened(train=str(tmp_path / where), **sections)
            assert (splits.classes, splits.shape, len(splits.test)) == (CLASSES, (3, 16, 20), 5)
            assert sorted(number for split in numbers(splits) for number in split) == list(
                range(24)
            )

    @pytest.mark.usefixtures("processes")
    def test_the_launching_process_needs_no_torch(self) -> None:
        code = (
            "import sys\nfrom allstep.train.config.data_config import DataConfig\nfrom"
            " allstep.train.config.run_config import RunConfig\nfrom"
            " allstep.train.input.splits import open_splits\ndata = DataConfig(name='mine',"
            " train='synthetic:50x16x16', num_classes=3, augment='Flip()',"
            " mix='Mixup(0.2)')\nassert open_splits(RunConfig(recipe='mine', data=data)).shape =="
            " (3, 16, 16)\nassert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


class TestWhatIsWrong:
    def test_classes_that_differ(self, tmp_path: Path) -> None:
        train, test = make_folder(tmp_path / "train", 3), make_folder(tmp_path / "test", 3)
        (test / "eel").rename(test / "frog")
        with pytest.raises(
            DataError, match="'eel' only in the training split; 'frog' only in the other"
        ):
            opened(train=str(train), test=str(test), augment="Resize(8)", prepare="Resize(8)")

    def test_parts_that_are_taken_for_classes(self, tmp_path: Path) -> None:
        for name in ("train", "val"):
            make_folder(tmp_path / name, 2)
        with pytest.raises(
            DataError,
            match=(
                r"splits of a dataset rather than classes: set data.train=.*/train"
                r" data.validation=.*/val"
            ),
        ):
            opened(train=str(tmp_path))

    @pytest.mark.parametrize("key", ["augment", "prepare"])
    def test_images_of_many_sizes(self, tmp_path: Path, key: str) -> None:
        folder = make_folder(tmp_path / "photos", 4)
        other = {"augment": "prepare", "prepare": "augment"}[key]
        with pytest.raises(
            ConfigError,
            match=rf"'data.{key}': .* many sizes, from 24x32 to 27x32, .*RandomResizedCrop\(224\)",
        ):
            opened(train=str(folder), **{other: "Resize(8)", key: "Flip()"})

    @pytest.mark.parametrize(
        ("labels", "section", "message"),
        [
            (
                [0, 1, 2, 9],
                {"num_classes": 4},
                "sample 3 of .*: its label is 9, expected 0 to 3, and 9 more like it",
            ),
            ([0, 1, 2, 3], {"test": 40}, "'data.test': expected 1 to 39 of 40 samples, found 40"),
            (
                [0, 1, 2, 3],
                {"test": 20, "validation": 20},
                "'data.validation': expected 1 to 19 of 20 samples, found 20",
            ),
            ([0, 1, 2, 3], {"augment": "Flop()"}, "'data.augment': no operation is called 'Flop'"),
            (
                [0, 1, 2, 3],
                {"mean": (1.0, 2.0), "std": (1.0,)},
                "'data.mean': expected one value for each of 1 channels, found 2",
            ),
            ([0, 1, 2, 3], {"train": "nowhere"}, "data.train: nowhere: no such file or folder"),
            ([0, 1, 2, 3], {"test": "nowhere"}, "data.test: nowhere: no such file or folder"),
            ([0, 1, 2, 3], {"test": "synthetic:9x6x5"}, "have 1 channels, those in synthetic 3"),
        ],
    )
    def test_each_is_one_line(
        self, tmp_path: Path, labels: list[int], section: dict[str, Any], message: str
    ) -> None:
        folder = write_mnist(tmp_path / "mnist", labels=labels * 10, test=None)
        with pytest.raises(UserError, match=message) as caught:
            opened(**{"train": str(folder), **section})
        assert "\n" not in str(caught.value)

    def test_records_that_do_not_state_how_many_classes_there_are(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "few.tar", "w") as tar:
            for number in range(20):
                for suffix, content in (("jpg", encoded(number)), ("cls", b"%d" % (number % 3))):
                    member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        with pytest.raises(
            ConfigError,
            match=(
                r"the 20 records of .*few.tar do not state how many classes there are: set"
                r" data.num_classes"
            ),
        ):
            opened(train=str(tmp_path / "few.tar"))
        splits = opened(train=str(tmp_path / "few.tar"), num_classes=3)
        assert (splits.classes, splits.shape) == (("0", "1", "2"), (3, 24, 32))

    def test_a_set_without_a_good_image(self, tmp_path: Path) -> None:
        (tmp_path / "photos" / "cat").mkdir(parents=True)
        for number in range(5):
            (tmp_path / "photos" / "cat" / f"{number}.jpg").write_bytes(b"not an image")
        aged(tmp_path / "photos")
        with pytest.raises(
            DataError,
            match=r"no good image among .* that were tried; the last one: sample .*cat/",
        ):
            opened(train=str(tmp_path / "photos"))


class TestFigures:
    def test_grey_arrays_against_numpy(self) -> None:
        splits = opened(name="digits")
        source = splits.train.source
        assert isinstance(source, ArraySource) and splits.train.numbers is not None
        kept = source.data[splits.train.numbers].astype(np.float64)
        assert measure(splits) == {
            "mean": pytest.approx((kept.mean(),)),
            "std": pytest.approx((kept.std(),)),
        }

    def test_colours_are_measured_as_they_are_evaluated(self, tmp_path: Path) -> None:
        """Reference: all images of the training split, one by one.

        One file is broken and does not count.
        """
        folder = make_folder(tmp_path / "photos", 8)
        (folder / "dog" / "003.jpg").write_bytes(b"broken")
        splits = opened(train=str(folder), augment="RandomResizedCrop(8)", prepare="CentreCrop(12)")
        prepared = make_loaders(
            config(overfit=len(splits.train), prepare="CentreCrop(12)"),
            splits,
            World.alone(),
            tmp_path,
        )["test"]
        images = torch.cat([batch.data for batch in prepared.batches()])
        assert images.shape[1:] == (3, 12, 12)
        levels = images.double().transpose(0, 1).flatten(1)
        found = measure(splits)
        assert found["mean"] == pytest.approx(levels.mean(1).tolist())
        assert found["std"] == pytest.approx(levels.std(1, correction=0).tolist())

    def test_the_config_may_give_them(self) -> None:
        section = {"train": "synthetic:30x8x8", "mean": (9.0,), "std": (1.0, 2.0, 3.0)}
        splits = opened(num_classes=3, **section)
        assert measure(splits) == {"mean": (9.0, 9.0, 9.0), "std": (1.0, 2.0, 3.0)}
        assert splits.image_facts() == {
            "shape": [3, 8, 8],
            "trained_shape": [3, 8, 8],
            "mean": [9.0, 9.0, 9.0],
            "std": [1.0, 2.0, 3.0],
            "prepare": "none",
            "classes": ["0", "1", "2"],
        }

    def test_images_that_are_all_the_same_are_not_divided_by_zero(self) -> None:
        splits = opened(name="digits")
        black = ArraySource(np.zeros((1437, 8, 8), np.uint8), np.zeros(1437, np.int64))
        assert min(measure(replace(splits, train=replace(splits.train, source=black)))["std"]) > 0

    @pytest.mark.parametrize("channels_last", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", [(4, 6, 5), (4, 1, 6, 5), (4, 3, 6, 5), (0, 3, 6, 5)])
    def test_to_input_against_the_formula(
        self, shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool
    ) -> None:
        channels = shape[1] if len(shape) == 4 else 1
        mean, std = [100.0, 90.5, 3.25][:channels], [60.0, 11.0, 0.5][:channels]
        to_input = make_to_input(mean, std, CPU, dtype, channels_last)
        stored = torch.randint(0, 256, shape, dtype=torch.uint8)
        memories = (
            [stored]
            if len(shape) == 3
            else [stored, stored.contiguous(memory_format=torch.channels_last)]
        )
        for given_images in [*memories, stored.float()]:
            before = given_images.clone()
            made = to_input(given_images)
            images = stored.double().view(-1, channels, 6, 5)
            expected = (images - torch.tensor(mean).double().view(-1, 1, 1)) / torch.tensor(
                std
            ).double().view(-1, 1, 1)
            torch.testing.assert_close(made, expected.to(dtype))
            assert made.is_contiguous(
                memory_format=torch.channels_last if channels_last else torch.contiguous_format
            )
            assert torch.equal(given_images, before)


class TestLoaders:
    def loaders(
        self, tmp_path: Path, made: RunConfig, world: World | None = None
    ) -> dict[str, Loader]:
        return make_loaders(made, open_splits(made), world or World.alone(), tmp_path, CPU)

    def test_two_ranks_read_what_one_does(self, tmp_path: Path) -> None:
        made = config(
            batch=10, name="digits", augment="PadAndCrop(8, pad=1), Flip(alternating=True)"
        )
        alone = self.loaders(tmp_path, made)
        both = [
            self.loaders(tmp_path / str(world.rank), made, world) for world in places(["here"] * 2)
        ]
        for split in ("train", "validation", "test"):
            whole = list(alone[split].batches(0, 60))
            halves = [list(each[split].batches(0, 60)) for each in both]
            joined = [batch for two in zip(*halves, strict=True) for batch in two]
            assert torch.equal(
                torch.cat([batch.data for batch in whole]),
                torch.cat([batch.data for batch in joined]),
            )

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_any_number_of_ranks_reads_each_sample_of_a_part_once(
        self, tmp_path: Path, size: int
    ) -> None:
        """From any position: a run that resumes with other workers continues the same order."""
        made = config(batch=64, name="digits", use="1/5")
        part = open_splits(made).train.numbers
        assert part is not None and len(part) == 258
        alone = self.loaders(tmp_path, made)["train"]
        order_of_one = np.concatenate([batch.samples for batch in alone.batches(0, 516)])
        assert sorted(order_of_one[:258].tolist()) == sorted(part.tolist())
        read = []
        for world in places(["here"] * size):
            loader = self.loaders(tmp_path / str(world.rank), made, world)["train"]
            read.append([batch.samples for batch in loader.batches(128, 516)])
        joined = np.concatenate([share for step in zip(*read, strict=True) for share in step])
        assert joined.tolist() == order_of_one[128:].tolist()

    def test_evaluation_sees_images_as_they_are_and_in_their_order(self, tmp_path: Path) -> None:
        made = config(name="digits", augment="PadAndCrop(8, pad=2)")
        loader = self.loaders(tmp_path, made)["test"]
        images = load(find_set(named_set("digits"))).test
        seen = torch.cat([batch.data for batch in loader.batches()])
        assert torch.equal(seen, torch.from_numpy(images.images.copy()))
        assert loader.batch > made.batch

    def test_an_evaluation_batch_of_large_images_is_smaller(self, tmp_path: Path) -> None:
        for side, most in ((8, 500), (100, 200)):
            loaders = self.loaders(
                tmp_path, config(train=f"synthetic:200x{side}x{side}", num_classes=3)
            )
            assert loaders["validation"].batch == most

    def test_overfitting_sees_the_same_few_samples_everywhere_as_they_are(
        self, tmp_path: Path
    ) -> None:
        made = config(
            batch=64,
            overfit=16,
            name="digits",
            augment="PadAndCrop(8, pad=2), Flip()",
            mix="Mixup(0.5)",
        )
        loaders = self.loaders(tmp_path, made)
        batches = {split: next(iter(loader.batches())) for split, loader in loaders.items()}
        samples = {split: sorted(batch.samples.tolist()) for split, batch in batches.items()}
        assert samples["train"] == samples["validation"] == samples["test"]
        assert len(samples["train"]) == 16
        ours, theirs = (
            dict(zip(batch.samples.tolist(), batch.data, strict=True))
            for batch in (batches["train"], batches["test"])
        )
        assert all(torch.equal(ours[number], theirs[number]) for number in ours)
        assert batches["train"].target.ndim == 1

    def test_batches_are_mixed_if_asked(self, tmp_path: Path) -> None:
        loaders = self.loaders(tmp_path, config(name="digits", mix="Mixup(0.5), Cutmix(1.0)"))
        batch = next(iter(loaders["train"].batches()))
        assert batch.data.shape == (8, 1, 8, 8) and batch.target.shape == (8, 10)
        torch.testing.assert_close(batch.target.sum(1), torch.ones(8))
        assert next(iter(loaders["test"].batches())).target.ndim == 1

    def test_the_training_sample_is_fixed_prepared_and_as_large_as_the_validation_part(
        self, tmp_path: Path
    ) -> None:
        made = config(name="digits", augment="PadAndCrop(8, pad=2)", mix="Mixup(0.5)")
        splits = open_splits(made)
        loader = make_sample_loader(made, splits, World.alone(), CPU)
        assert (
            loader is not None and loader.numbers is not None and splits.train.numbers is not None
        )
        assert len(loader.numbers) == len(splits.validation) == 143
        assert set(loader.numbers) < set(splits.train.numbers) and list(loader.numbers) == sorted(
            set(loader.numbers)
        )
        images = load(find_set(named_set("digits"))).train
        seen = torch.cat([batch.data for batch in loader.batches()])
        assert torch.equal(seen, torch.from_numpy(images.images[loader.numbers]))
        again, other = splits.train.sample(143, seed=0), splits.train.sample(143, seed=1)
        assert np.array_equal(again.numbers, loader.numbers) and not np.array_equal(
            other.numbers, loader.numbers
        )

    def test_the_training_sample_has_a_limit(self) -> None:
        made = config(train="synthetic:20000x8x8", num_classes=3, validation=7000)
        loader = make_sample_loader(made, open_splits(made), World.alone(), CPU)
        assert loader is not None and loader.num_samples == 5000
        few = config(train="synthetic:100x8x8", validation="synthetic:300x8x8", num_classes=3)
        loader = make_sample_loader(few, open_splits(few), World.alone(), CPU)
        assert loader is not None and loader.num_samples == len(open_splits(few).train)

    def test_there_is_no_training_sample_where_validation_is_one(self) -> None:
        made = config(batch=64, overfit=16, name="digits")
        assert make_sample_loader(made, open_splits(made), World.alone(), CPU) is None

    def test_a_training_sample_of_another_size_than_the_validation_part(self) -> None:
        sizes = {
            "train": "synthetic:100x12x12",
            "validation": "synthetic:30x8x8",
            "augment": "PadAndCrop(8, pad=0)",
        }
        made = config(**sizes, num_classes=3)
        with pytest.raises(
            ConfigError, match=r"training images of 3x12x12 and validation images of 3x8x8"
        ):
            make_sample_loader(made, open_splits(made), World.alone(), CPU)

    def test_a_batch_larger_than_the_set(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match="a batch of 2000 is larger than the training split, which has 1294"
        ):
            self.loaders(tmp_path, config(batch=2000, name="digits"))

    def test_a_bad_sample_is_skipped_and_listed_or_ends_it(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "photos", 8)
        (folder / "dog" / "003.jpg").write_bytes(b"broken")
        sizes = {
            "train": str(folder),
            "augment": "Resize(8)",
            "prepare": "Resize(8)",
            "validation": 1,
            "test": 1,
        }
        loaders = self.loaders(tmp_path, config(**sizes))
        weights = [sum(batch.weight for batch in loader.batches()) for loader in loaders.values()]
        assert sum(weights) == 23
        assert sum(loader.num_bad for loader in loaders.values()) == 1
        assert list(tmp_path.glob("quarantine*.jsonl"))
        strict = self.loaders(tmp_path / "strict", config(**sizes, strict=True))
        with pytest.raises(DataError, match=r"003\.jpg"):
            [list(loader.batches()) for loader in strict.values()]


@pytest.mark.parametrize("label", [1.5, float("nan"), np.array([0, 1]), True, np.float64(1.0)])
def test_labels_that_are_no_classes_are_named(label: object) -> None:
    with pytest.raises(
        DataError, match=r"^file: expected a label that is one whole number, the class, found "
    ):
        _check_label(label, "file")
    _check_label(np.int64(3), "file")
