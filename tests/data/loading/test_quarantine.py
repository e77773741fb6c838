"""Bad samples are skipped at any number of ranks and listed once; too many are an error."""

import json
import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from allstep.data import Loader
from allstep.data.augment.transform import Transform
from allstep.data.loading.quarantine import Quarantine, default_budget
from allstep.data.sources.source import BadSample, Place, Sample
from allstep.errors import DataError
from allstep.world import places
from support.array_sources import Arrays, Singly, sample_images

BAD = (2, 3, 11, 30)
PLAIN = Transform(lambda image: image, shape=(4, 4, 3))


def loader(bad: tuple[int, ...] = BAD, source: type[Arrays] = Singly, **options: Any) -> Loader:
    return Loader(
        source(sample_images(40), bad=bad), **{"batch": 8, "seed": 1, "kind": "threads", **options}
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", [None, PLAIN])
@pytest.mark.parametrize("source", [Arrays, Singly])
def test_a_bad_sample_leaves_its_batch_smaller_and_nothing_else_moves(
    source: type[Arrays], transform: Transform | None, workers: int
) -> None:
    """Reference: the same dataset without bad samples."""
    good = list(loader(bad=(), transform=transform, workers=0).batches(0, 80))
    for size in (1, 2, 3):
        options: dict[str, Any] = {"source": source, "transform": transform, "workers": workers}
        ranks = [
            list(loader(world=world, **options).batches(0, 80)) for world in places(["here"] * size)
        ]
        for whole, *shares in zip(good, *ranks, strict=True):
            keep = ~np.isin(whole.samples, BAD)
            assert all(share.position == whole.position for share in shares)
            assert all(
                share.weight == len(share.data) == len(share.target) == len(share.samples)
                for share in shares
            )
            np.testing.assert_array_equal(
                np.concatenate([share.samples for share in shares]), whole.samples[keep]
            )
            assert torch.equal(
                torch.cat([share.data for share in shares]), whole.data[torch.from_numpy(keep)]
            )


@pytest.mark.parametrize("transform", [None, PLAIN])
def test_a_share_of_bad_samples_only_has_weight_0(transform: Transform | None) -> None:
    ours = Loader(Singly(sample_images(6), bad=(0, 1, 2)), transform, batch=3, seed=None, workers=0)
    first, second = ours
    assert (first.weight, second.weight) == (0, 3)
    assert first.data.shape[1:] == second.data.shape[1:]
    assert first.target.dtype == second.target.dtype
    assert ours.num_bad == 3


def test_all_are_listed_once_with_the_place_and_the_reason(tmp_path: Path) -> None:
    ours = loader(quarantine=tmp_path / "new" / "quarantine.jsonl", workers=2)
    for _ in range(3):
        list(ours)
    listed = lines(tmp_path / "new" / "quarantine.jsonl")
    assert sorted(line["number"] for line in listed) == list(BAD)
    for line in listed:
        assert line == {
            "number": line["number"],
            "file": "memory",
            "offset": line["number"],
            "epoch": 0,
        } | {"reason": "made to be bad"}
    assert ours.num_bad == len(BAD)


def test_each_rank_writes_its_own_list(tmp_path: Path) -> None:
    for world in places(["here"] * 3):
        list(loader(quarantine=tmp_path / "quarantine.jsonl", world=world))
    listed = [line["number"] for path in sorted(tmp_path.iterdir()) for line in lines(path)]
    assert sorted(listed) == list(BAD)
    assert {path.name for path in tmp_path.iterdir()} <= {
        "quarantine.jsonl",
        "quarantine-rank1.jsonl",
        "quarantine-rank2.jsonl",
    }


def test_nothing_bad_makes_no_list(tmp_path: Path) -> None:
    list(loader(bad=(), quarantine=tmp_path / "quarantine.jsonl"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_are_an_error_that_names_the_first_and_the_list(
    tmp_path: Path, workers: int
) -> None:
    path = tmp_path / "quarantine.jsonl"
    ours = loader(budget=3, quarantine=path, workers=workers)
    with pytest.raises(
        DataError,
        match=r"4 samples are bad, more than the 3 allowed; the first: sample \d+ \(memory",
    ) as caught:
        list(ours)
    assert str(path) in str(caught.value)
    assert len(lines(path)) == 4
    assert list(loader(budget=4, workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_strict_stops_at_the_first(workers: int) -> None:
    with pytest.raises(
        DataError, match=r"sample \d+ \(memory at byte \d+\): made to be bad \(strict"
    ):
        list(loader(strict=True, workers=workers))
    assert list(loader(bad=(), strict=True, workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("limit", [{"strict": True}, {"budget": 3}])
def test_an_error_that_was_caught_is_raised_again(limit: dict[str, Any], workers: int) -> None:
    ours = loader(**limit, workers=workers)
    for _ in range(3):
        with pytest.raises(DataError, match=r"strict|more than the 3 allowed"):
            list(ours)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_without_a_good_sample_is_an_error(workers: int) -> None:
    for size in (1, 2):
        world = places(["here"] * size)[0]
        ours = loader(bad=tuple(range(40)), transform=PLAIN, workers=workers, world=world)
        with pytest.raises(
            DataError,
            match=rf"none of the {40 // size} samples of an epoch was good; the last: sample",
        ):
            list(ours)
    tail = loader(bad=tuple(range(20, 40)), seed=None, workers=workers)
    assert sum(batch.weight for batch in tail.batches(20, 80)) == 20


def test_a_resumed_run_continues_the_list_of_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    list(loader(quarantine=path))
    with path.open("a") as file:
        file.write('torn\n{"number": 3}\n[]\n')
    before = path.read_text()
    again = loader(quarantine=path)
    assert again.num_bad == len(BAD)
    list(again)
    assert (path.read_text(), again.num_bad) == (before, len(BAD))
    more = loader(bad=(*BAD, 31), quarantine=path, budget=len(BAD))
    with pytest.raises(DataError, match="5 samples are bad, more than the 4 allowed"):
        list(more)


class Encoded(Singly):
    """PNG files, of which every other one is truncated."""

    def read(self, number: int) -> Sample:
        content = cv2.imencode(".png", self.images[number])[1].tobytes()
        return Sample(content[: 20 if number % 2 else None], 0)


class WithoutNames(Singly):
    """Some samples lack a feature that others have."""

    def read(self, number: int) -> Sample:
        sample = super().read(number)
        return sample if number < 5 else Sample(sample.data, sample.target)


def test_a_sample_that_cannot_be_decoded_or_lacks_a_feature_is_bad() -> None:
    ours = Loader(Encoded(sample_images(10)), PLAIN, batch=10, workers=0, seed=None)
    assert next(iter(ours)).samples.tolist() == [0, 2, 4, 6, 8]
    ours = Loader(WithoutNames(sample_images(10)), batch=10, workers=0, seed=None, fields=("name",))
    assert next(iter(ours)).samples.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_warning() -> None:
    quarantine = Quarantine(2, path=Path("/dev/full"))
    with pytest.warns(RuntimeWarning, match="No space left on device; the run continues"):
        quarantine.note(BadSample(1, Place("a", 5), "torn"), 0)
    quarantine.note(BadSample(2, Place("a", 6), "torn"), 0)
    assert quarantine.num_bad == 2


def test_budget() -> None:
    assert [default_budget(n) for n in (10, 100_000, 1_281_167)] == [100, 100, 1281]


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_a_link_or_pipe_in_place_of_the_list_is_not_written_to(tmp_path: Path, kind: str) -> None:
    """A run folder may belong to another user: a link in it could point to a file of this user, and
    a pipe would block."""
    path, target = tmp_path / "quarantine.jsonl", tmp_path / "other"
    if kind == "link":
        target.write_bytes(b"mine")
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(target)
    quarantine = Quarantine(5, path=path)
    with pytest.warns(RuntimeWarning, match="bad samples can no longer be listed"):
        quarantine.note(BadSample(1, Place("x"), "odd"), epoch=0)
    assert quarantine.num_bad == 1
    assert target.read_bytes() == b"mine" if kind == "link" else not target.exists()
