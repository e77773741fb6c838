"""`allstep verify`: one worker against several, in float64; a mistake of one rank is found and
named.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import allstep
from allstep.console.text_table import columns
from allstep.errors import ConfigError
from allstep.train import read_config
from allstep.train.check.compare_workers import (
    Answer,
    Compared,
    Difference,
    Plan,
    Step,
    differing_answers,
    made_exact,
    make_plan,
    parse_workers,
    table,
    uneven,
    write_plan,
)
from allstep.train.check.verify import compare, run, size_of
from allstep.train.config.run_config import RunConfig
from support.ranks import clean_environment

# One number of workers against another


def answer_of(config: RunConfig, folder: Path) -> Answer:
    os.chdir(folder)  # where a user's model is
    world = allstep.init()
    torch.set_num_threads(1)  # threads that spin for each other starve on a busy machine
    return run(config, world, folder)


def verified(
    ranks: Any, folder: Path, overrides: list[str], numbers: tuple[int, ...], **changes: Any
) -> tuple[Plan, list[Answer]]:
    config, _ = made_exact(read_config("digits", overrides), numbers)
    plan = make_plan(config, numbers, num_validation=40).model_copy(update=changes)
    write_plan(folder, plan)
    return plan, [ranks(number, answer_of, config, folder)[0] for number in numbers]


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (
            [
                "batch=16",
                "share_weights=true",
                "optimizer.clip=0.01",
                "accumulation=3",
                "label_smoothing=0.1",
            ],
            (1, 3),
        ),
        (["batch=16", "share_weights=true", "optimizer=lars", "ema.decay=0.9"], (2, 1)),
        (["batch=16", "optimizer=adamw", "model=lenet", "model.options.dropout=0.5"], (1, 2)),
    ],
)
def test_several_workers_compute_what_fewer_do(
    ranks: Any, tmp_path: Path, overrides: list[str], numbers: tuple[int, ...]
) -> None:
    plan, answers = verified(ranks, tmp_path, overrides, numbers)
    assert list(differing_answers(plan, answers)) == []
    assert [each.count for each in answers] == [plan.evaluated] * len(numbers)
    for step in answers[1].steps:
        assert step.gradient.worst is not None
        assert step.gradient.size > 0
        assert step.gradient.worst.relative < 1e-12


NORMS = """
from torch import nn


def factory(num_classes):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, num_classes))
"""


@pytest.mark.parametrize("batches", [(6, 6), (6, 5, 2)])
def test_a_model_with_batch_norms_is_verified_with_synchronized_ones(
    ranks: Any, tmp_path: Path, batches: tuple[int, ...]
) -> None:
    """Batch norms in a user's model are known only in the worker."""
    (tmp_path / "norms.py").write_text(NORMS)
    overrides = ["model=norms:factory", "batch=6", "accumulation=2"]
    plan, answers = verified(ranks, tmp_path, overrides, (1, 3), batches=batches)
    assert [note.split(":")[0] for note in answers[0].notes][1:] == ["accumulation=2"]
    assert "1 batch norm of its own" in answers[0].notes[0]
    assert list(differing_answers(plan, answers)) == []


def test_another_seed_is_found_at_the_first_step(ranks: Any, tmp_path: Path) -> None:
    plan, (reference,) = verified(ranks, tmp_path, ["batch=8"], (1,), batches=(8,))
    config, _ = made_exact(read_config("digits", ["batch=8", "seed=1"]), (2,))
    other = ranks(2, answer_of, config, tmp_path)[0]
    (line,) = differing_answers(plan, [reference, other])
    assert "differ from 1 worker at step 1 (8 samples): the loss is" in line
    assert "the weights or the samples differ from the start" in line


# As the user types it

WRONG_ON_RANK_1 = """
import os
import torch
from torch import nn


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1.001 if os.environ["ALLSTEP_RANK"] == "1" else 1.0)


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, num_classes)

    def forward(self, images):
        return self.last(Wrong.apply(self.first(images.flatten(1)).relu()))


def factory(num_classes):
    return Net(num_classes)
"""


@pytest.mark.usefixtures("processes")
def test_a_wrong_gradient_of_one_rank_is_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG_ON_RANK_1)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "allstep",
            "verify",
            "digits",
            "--workers",
            "1,2",
            "model=wrong:factory",
            "batch=16",
        ],
        cwd=tmp_path,
        env={**clean_environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 1, done.stderr
    assert "1 worker: 5 steps of 16, 16, 15, 16, 3 samples" in done.stdout
    assert (
        "2 workers differ from 1 worker at step 1 (16 samples): the gradient of first.weight (16x64)"
        in done.stdout
    )
    assert "2 of 4 tensors differ" in done.stdout
    assert "Traceback" not in done.stderr
    assert [name for name in os.listdir(scratch) if "allstep" in name] == []


# The plan


@given(st.integers(1, 500), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_uneven_is_the_largest_that_no_number_of_workers_divides(
    most: int, workers: list[int]
) -> None:
    several = [each for each in workers if each > 1]
    fitting = [n for n in range(1, most + 1) if all(n % each for each in several)]
    assert uneven(most, workers) == max(fitting, default=most)


def test_the_plan_has_uneven_shares_and_workers_without_any() -> None:
    config = read_config("digits").resolved(1)
    assert make_plan(config, (1, 2, 4), 143) == Plan(batches=(64, 64, 63, 64, 3), evaluated=143)
    assert make_plan(config, (1, 8), 5000) == Plan(batches=(64, 64, 63, 64, 7), evaluated=500)


@pytest.mark.parametrize("text", ["", "2", "1,1", "1,x", "0,1", "1.5,2"])
def test_two_numbers_of_workers_are_needed(text: str) -> None:
    with pytest.raises(ConfigError, match="two or more numbers of workers"):
        parse_workers(text)


def test_what_cannot_agree_is_removed_and_reported() -> None:
    overrides = [
        "model.norm=ghost",
        "data.mix=Mixup(0.2)",
        "precision=bfloat16",
        "execution=compiled",
        "batch_per_worker=5",
    ]
    config, notes = made_exact(read_config("digits", overrides), (1, 4))
    assert (config.model.norm, config.data.mix, config.precision, config.execution) == (
        "sync",
        "none",
        "float64",
        "channels-last",
    )
    assert (config.batch, config.batch_per_worker) == (20, None)
    assert [note.partition(":")[0] for note in notes] == [
        "batch_per_worker=5",
        "model.norm=ghost",
        "data.mix=Mixup(0.2)",
    ]
    assert made_exact(read_config("digits"), (1, 2))[1] == []


# Comparing

REFERENCE = {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(2, 2)}


def test_equal_tensors_agree() -> None:
    compared = compare(REFERENCE, dict(REFERENCE), 1e-9)
    assert compared.worst is not None
    assert (compared.worst.relative, compared.first, compared.beyond, compared.of) == (
        0,
        None,
        0,
        2,
    )
    assert compared.size == pytest.approx(math.sqrt((25 + 4) / 6))


@pytest.mark.parametrize("value", [1.5, math.nan, math.inf])
def test_the_first_that_differs_is_named(value: float) -> None:
    found = {"a": REFERENCE["a"] * (1 + 1e-15), "b": torch.tensor([[1.0, value], [1.0, 1.0]])}
    compared = compare(REFERENCE, found, 1e-9)
    assert compared.first is not None
    assert compared.worst is not None
    assert (compared.first.tensor, compared.worst.tensor, compared.beyond) == ("b", "b", 1)
    if value == 1.5:
        assert compared.first.relative == pytest.approx(0.25)  # sqrt(0.5**2 / 4) of 1


def test_a_gradient_that_is_missing_counts_as_zeros() -> None:
    compared = compare(REFERENCE, {"a": REFERENCE["a"]}, 1e-9)
    assert compared.first is not None
    assert (compared.first.tensor, compared.first.relative, compared.first.found) == ("b", 1.0, 0.0)


def test_what_is_zero_but_for_rounding_agrees() -> None:
    noise = {**REFERENCE, "bias": torch.full((3,), 1e-17, dtype=torch.float64)}
    assert compare(noise, {**noise, "bias": -noise["bias"]}, 1e-9).first is None
    assert size_of([]) == 0.0


# Texts

FINE = Compared(
    size=1.0, worst=Difference(tensor="w", shape=(2, 3), relative=1e-16, reference=1.0, found=1.0)
)
WORSE = Difference(tensor="w", shape=(2, 3), relative=0.5, reference=1.0, found=1.5)
OFF = Compared(size=1.0, worst=WORSE, first=WORSE, beyond=1, of=4)
PLAN = Plan(batches=(8, 7), evaluated=30)


def answer(**changes: Any) -> Answer:
    steps = (Step(loss=2.0, gradient=FINE), Step(loss=1.5, gradient=FINE))
    same: dict[str, Any] = {
        "workers": 2,
        "steps": steps,
        "weights": FINE,
        "loss": 1.0,
        "metrics": {"accuracy": 0.5},
        "count": 30,
    }
    return Answer(**{**same, **changes})


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({}, []),
        (
            {"steps": (Step(loss=2.0, gradient=FINE), Step(loss=1.6, gradient=FINE))},
            ["at step 2 (7 samples): the loss is 1.5"],
        ),
        (
            {"steps": (Step(loss=2.0, gradient=FINE), Step(loss=math.nan, gradient=FINE))},
            ["at step 2", "nan here"],
        ),
        (
            {"steps": (Step(loss=2.0, gradient=OFF), Step(loss=1.6, gradient=OFF))},
            ["at step 1", "the gradient of w (2x3)", "1 of 4"],
        ),
        ({"weights": OFF}, ["after the last step: the weight of w (2x3)"]),
        ({"count": 31}, ["30 samples were counted there and 31 here"]),
        ({"metrics": {"accuracy": 0.6}}, ["the accuracy is 0.5 there and 0.6 here"]),
        (
            {"alike": "w differs on rank 1"},
            ["2 workers do not have the same weights", "w differs on rank 1"],
        ),
    ],
)
def test_the_first_difference_is_reported(changes: dict[str, Any], texts: list[str]) -> None:
    found = list(differing_answers(PLAN, [answer(workers=1), answer(**changes)]))
    assert len(found) == bool(texts)
    assert all(text in line for line in found for text in texts)


def test_the_table_has_a_column_for_each_number() -> None:
    rows = list(table(PLAN, [answer(workers=1), answer(), answer(workers=4, weights=OFF)]))
    assert rows[0] == ["", "samples", "1 worker", "2 workers", "4 workers"]
    assert {len(row) for row in rows} == {5}
    assert ["weights after it", "", "size 1", "1.0e-16 w", "5.0e-01 w"] in rows
    lines = list(columns(rows))
    assert len(lines) == len(rows)
    assert not any(line.endswith(" ") for line in lines)
