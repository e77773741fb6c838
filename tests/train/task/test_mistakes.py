"""The files in mistakes/, compared with slow numpy, on one and three ranks, and the report."""

import base64
import errno
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import allstep
from allstep.data import ArraySource, Loader, Transform
from allstep.report.mistakes import read_confusion, read_mistakes
from allstep.train.score.evaluate import evaluate
from allstep.train.task.classification import Classification, WrongPredictions
from allstep.train.task.mistakes import Mistakes, to_png
from allstep.world import World

NAMES = ("ankle boot", "bag", "coat", "dress", "5 é")


def samples(n: int, channels: int) -> tuple[Any, Any, Any]:
    """Return images whose first pixels encode the sample number, labels, and logits of a model."""
    rng = np.random.default_rng(n)
    images = rng.integers(0, 256, (n, 6, 5, channels), np.uint8)
    images[:, 0, 0, 0] = np.arange(n)
    return (
        images,
        rng.integers(0, len(NAMES), n),
        rng.standard_normal((n, len(NAMES))).astype(np.float32) * 3,
    )


def slow_reference(
    labels: Any, logits: Any, keep: int
) -> tuple[list[list[int]], list[tuple[int, str, str, float]]]:
    counts, wrong = [[0] * len(NAMES) for _ in NAMES], []
    for number, (label, row) in enumerate(
        zip(labels.tolist(), logits.astype(np.float64), strict=True)
    ):
        shares = np.exp(row) / np.exp(row).sum()
        taken = int(shares.argmax())
        counts[label][taken] += 1
        if taken != label:
            wrong.append((number, NAMES[label], NAMES[taken], float(shares[taken])))
    return counts, sorted(wrong, key=lambda mistake: -mistake[3])[:keep]


class FixedLogits(torch.nn.Module):
    """A model with given logits for the sample whose number is in the first pixel."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = torch.from_numpy(logits)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits[images[:, 0, 0, 0].long()]


def evaluate_and_write(n: int, channels: int, keep: int, folder: Path) -> str | None:
    world = allstep.init()
    images, labels, logits = samples(n, channels)
    loader = Loader(ArraySource(images, labels), Transform(), batch=15, world=world, seed=None)
    mistakes = Mistakes(NAMES, keep)
    evaluate(
        FixedLogits(logits),
        loader,
        lambda data: data.float(),
        Classification(logits.shape[1]),
        examples=WrongPredictions(mistakes),
    )
    return mistakes.write(folder, world)


def pixels(source: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))


@pytest.mark.parametrize(("num_ranks", "n", "channels"), [(1, 100, 1), (3, 100, 3), (3, 2, 1)])
def test_the_report_reads_the_worst_of_all_ranks(
    ranks: Any, tmp_path: Path, num_ranks: int, n: int, channels: int
) -> None:
    ranks(num_ranks, evaluate_and_write, n, channels, 10, tmp_path)
    images, labels, logits = samples(n, channels)
    counts, worst = slow_reference(labels, logits, 10)
    notes: list[str] = []
    confusion, found = (
        read_confusion(tmp_path / "mistakes", notes),
        read_mistakes(tmp_path / "mistakes", notes),
    )
    assert notes == []
    assert confusion is not None
    assert confusion.classes == NAMES
    assert confusion.counts == tuple(map(tuple, counts))
    assert [(m.number, m.label, m.predicted) for m in found] == [mistake[:3] for mistake in worst]
    assert [m.probability for m in found] == pytest.approx(
        [mistake[3] for mistake in worst], abs=1e-5
    )
    for mistake in found:
        assert mistake.number is not None
        assert (pixels(mistake.source) == images[mistake.number].squeeze()).all()


@settings(max_examples=1000 if os.environ.get("ALLSTEP_SOAK") else 20)
@given(
    order=st.permutations(range(12)),
    cuts=st.sets(st.integers(1, 11)),
    keep=st.integers(1, 8),
    levels=st.integers(1, 4),
)
def test_batches_do_not_matter(order: list[int], cuts: set[int], keep: int, levels: int) -> None:
    """With any batches and order, and many equal probabilities, the worst mistakes are the same and
    all are counted."""
    rng = np.random.default_rng(levels)
    logits = torch.from_numpy(rng.integers(0, levels, (12, 3)).astype(np.float32))
    target, images = torch.from_numpy(rng.integers(0, 3, 12)), torch.zeros(12, 2, 2)
    mistakes = Mistakes((), keep)
    for rows in np.split(np.array(order), sorted(cuts)):
        mistakes.add(images[rows], rows, logits[rows], target[rows])
    shares, taken = logits.softmax(1).max(1)
    wrong = sorted((-shares[row].item(), row) for row in range(12) if taken[row] != target[row])
    assert [mistake.order for mistake in mistakes.worst] == wrong[:keep]
    assert mistakes.counts.sum() == 12
    assert mistakes.counts.trace() == 12 - len(wrong)


def collected(numbers: range, wrong: bool = True, classes: int = 3) -> Mistakes:
    mistakes = Mistakes(NAMES[:3])
    logits = (
        torch.nn.functional.one_hot(torch.ones(len(numbers), dtype=torch.int64), classes) * 50.0
    )
    target = (
        torch.zeros(len(numbers), dtype=torch.int64)
        if wrong
        else torch.ones(len(numbers), dtype=torch.int64)
    )
    mistakes.add(
        torch.zeros(len(numbers), 1, 4, 4, dtype=torch.uint8), np.array(numbers), logits, target
    )
    return mistakes


@pytest.fixture
def alone() -> Iterator[World]:
    """Create a process group of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World.alone()
    dist.destroy_process_group()


def listed(folder: Path) -> list[Any]:
    return json.loads((folder / "mistakes" / "mistakes.json").read_text())  # type: ignore[no-any-return]


def test_old_ones_are_replaced(alone: World, tmp_path: Path) -> None:
    assert collected(range(9)).write(tmp_path, alone) is None
    (tmp_path / "mistakes" / ".0001.png.part").write_bytes(b"a kill left this")
    assert collected(range(2)).write(tmp_path, alone) is None
    names = sorted(os.listdir(tmp_path / "mistakes"))
    assert names == ["0000.png", "0001.png", "confusion.json", "mistakes.json"]
    assert collected(range(5), wrong=False).write(tmp_path, alone) is None
    assert sorted(os.listdir(tmp_path / "mistakes")) == ["confusion.json", "mistakes.json"]
    assert listed(tmp_path) == []


def test_equally_bad_ones_are_chosen_by_number(alone: World, tmp_path: Path) -> None:
    """A confident model gives probability 1 to many wrong classes; the choice must not depend on
    the batches."""
    mistakes = Mistakes(NAMES[:3], keep=4)
    logits, target = torch.tensor([[90.0, 0, 0]] * 6), torch.ones(6, dtype=torch.int64)
    for numbers in ([9, 8, 11, 7, 6, 10], [5, 3, 2, 1, 4, 0]):
        mistakes.add(torch.zeros(6, 4, 4), np.array(numbers), logits, target)
    mistakes.write(tmp_path, alone)
    assert [entry["number"] for entry in listed(tmp_path)] == [0, 1, 2, 3]


def test_a_thousand_classes(alone: World, tmp_path: Path) -> None:
    mistakes, n = Mistakes([f"class {number}" for number in range(1000)]), 500
    logits = torch.randn(n, 1000, generator=torch.Generator().manual_seed(0))
    mistakes.add(torch.zeros(n, 3, 8, 8, dtype=torch.uint8), np.arange(n), logits, torch.arange(n))
    mistakes.write(tmp_path, alone)
    assert (tmp_path / "mistakes" / "confusion.json").stat().st_size < 2_100_000
    confusion = read_confusion(tmp_path / "mistakes", [])
    assert confusion is not None and confusion.total == n


def test_more_classes_than_a_matrix_is_good_for(alone: World, tmp_path: Path) -> None:
    collected(range(2), classes=5000).write(tmp_path, alone)
    assert len(read_mistakes(tmp_path / "mistakes", [])) == 2
    assert not (tmp_path / "mistakes" / "confusion.json").exists()


def test_classes_without_a_name_get_their_number(alone: World, tmp_path: Path) -> None:
    mistakes = Mistakes(())
    mistakes.add(
        torch.zeros(1, 2, 2), np.array([0]), torch.tensor([[0.0, 9, 0]]), torch.tensor([2])
    )
    mistakes.write(tmp_path, alone)
    assert (listed(tmp_path)[0]["label"], listed(tmp_path)[0]["predicted"]) == ("2", "1")


def test_samples_that_are_no_images_are_only_counted(alone: World, tmp_path: Path) -> None:
    mistakes = Mistakes(NAMES[:3])
    mistakes.add(
        torch.zeros(2, 7),
        np.arange(2),
        torch.tensor([[0.0, 9, 0], [float("nan")] * 3]),
        torch.tensor([2, 1]),
    )
    mistakes.write(tmp_path, alone)
    confusion = read_confusion(tmp_path / "mistakes", [])
    assert listed(tmp_path) == [] and confusion is not None and confusion.total == 2


def test_a_full_disk_is_reported_and_ends_nothing(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("allstep.train.task.mistakes.replace_file", full)
    assert "No space left on device" in (collected(range(2)).write(tmp_path, alone) or "")


@pytest.mark.parametrize("shape", [(224, 224, 3), (300, 500, 1)])
def test_a_large_image_is_made_smaller(shape: tuple[int, ...]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    small = Image.open(io.BytesIO(to_png(noise)))
    assert len(to_png(noise)) <= 40_000
    assert small.mode == ("RGB" if shape[2] == 3 else "L")
    assert small.width / small.height == pytest.approx(shape[1] / shape[0], rel=0.03)
    assert abs(np.asarray(small).mean() - noise.mean()) < 2


def test_floats_are_spread_over_the_levels() -> None:
    shown = np.asarray(Image.open(io.BytesIO(to_png(np.array([[[-1.0], [0.0], [1.0], [np.nan]]])))))
    assert shown.tolist() == [[0, 128, 255, 128]]
