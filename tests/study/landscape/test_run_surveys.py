"""A landscape of real run folders: any number of workers, interrupted or not, writes the same file."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import allstep
from allstep.errors import UserError
from allstep.files.lock import locked
from allstep.study.landscape.asked import Asked, Expected
from allstep.study.landscape.points import Grid, num_points
from allstep.study.landscape.result import read_line
from allstep.study.landscape.run_surveys import landscape
from allstep.train.folder.existing_run import Evaluation
from allstep.train.use.evaluate import reevaluate
from support.saved_runs import save_digits_run

NUM = 40
"""Samples of the subset: two batches, with fewer than the default of 256."""


def asked(run: Path, second: Path | None = None, grid: Grid = (3, 3), **more: Any) -> Asked:
    runs = [
        None if each is None else Evaluation(each, "train", device="cpu", num_samples=NUM)
        for each in (run, second)
    ]
    assert runs[0] is not None
    return Asked(runs[0], runs[1], grid, more.get("seed", 0), more.get("limit", 3600.0))


def compute(request: Asked, die_after: int | None = None) -> dict[str, Any]:
    """What a rank saw: the expectation, how many points were computed, the error; the loss of eval.

    `die_after`: rank 0 ends without a word after so many points.
    """
    world = allstep.init()
    torch.set_num_threads(1)
    seen: dict[str, Any] = {"progress": []}

    def progressed(done: int, total: int) -> None:
        seen["progress"].append((done, total))
        if len(seen["progress"]) == die_after:
            os._exit(9)

    def started(expected: Expected) -> None:
        seen["expected"] = expected

    try:
        outcome = landscape(request, world, started, progressed)
    except UserError as error:
        return seen | {"error": str(error)}
    seen["center"] = outcome.around.center.loss
    seen["notes"] = outcome.notes
    return seen


def with_eval(request: Asked) -> dict[str, Any]:
    """The same on one rank, with what `allstep eval` gives for the runs."""
    seen = compute(request)
    runs = [each for each in (request.first, request.second) if each is not None]
    seen["eval"] = [reevaluate(each, allstep.init()).score.loss for each in runs]
    return seen


def files(run: Path) -> dict[str, bytes]:
    """The files of the landscape by name, without the lock."""
    found = (run / "landscape").iterdir()
    return {each.name: each.read_bytes() for each in found if each.name != ".lock"}


def test_any_number_of_workers_and_a_killed_and_resumed_run_write_the_same_files(
    tmp_path: Path, ranks: Callable[..., Any]
) -> None:
    for seed in (0, 1):
        save_digits_run(tmp_path / "whole" / f"run{seed}", seed=seed)
    copies = [tmp_path / name for name in ("whole", "two", "three", "killed")]
    for copy in copies[1:]:
        shutil.copytree(copies[0], copy)
    requests = [asked(copy / "run0", copy / "run1") for copy in copies]
    total = num_points("around", (3, 3)) + num_points("line", (3, 3))

    seen = ranks(1, with_eval, requests[0])[0]
    assert seen["expected"].num_left == total == len(seen["progress"])
    line = read_line(copies[0] / "run0")
    assert line is not None
    assert seen["eval"] == [seen["center"], line.losses[-1]], "to the last bit"

    ranks(2, compute, requests[1])
    ranks(3, compute, requests[2])
    outcomes = ranks.outcomes(2, compute, requests[3], 7)
    assert outcomes[0].exit_code == 9
    left = files(copies[3] / "run0")
    assert len(left) == 1 and next(iter(left.values())).count(b"\n") == 7
    # The kill may have torn the last line.
    (torn,) = (each for each in (copies[3] / "run0" / "landscape").iterdir() if each.name in left)
    torn.write_bytes(left[torn.name][:-5])
    again = ranks(2, compute, requests[3])[0]
    assert again["expected"].num_left == total - 6
    assert again["progress"][-1] == (total, total)

    whole = files(copies[0] / "run0")
    assert set(whole) == {"around.json", "line.json"}
    for copy in copies[1:]:
        assert files(copy / "run0") == whole, copy.name

    # What has ended is not computed again; other settings are.
    assert "expected" not in ranks(1, compute, requests[0])[0]
    other = ranks(1, compute, asked(copies[0] / "run0", grid=(3, 3), seed=1))[0]
    assert other["expected"].num_left == num_points("around", (3, 3))
    assert files(copies[0] / "run0")["around.json"] != whole["around.json"]


def refusals(requests: list[Asked]) -> list[str]:
    return [compute(request).get("error", "") for request in requests]


def test_bad_input_is_one_line(tmp_path: Path, ranks: Callable[..., Any]) -> None:
    runs = {
        "run": (),
        "wide": ("model.options.widths=[5]",),
        "skip": ("model=cifar-resnet20", "model.options={}", "model.norm=batch"),
        "noskip": ("model=cifar-resnet20", "model.options={skip: false}", "model.norm=batch"),
    }
    for name, keys in runs.items():
        save_digits_run(tmp_path / name, *keys, **({"keys": ()} if "skip" in name else {}))
    save_digits_run(tmp_path / "shifted", mean=5.0)
    save_digits_run(tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "checkpoints")
    run = tmp_path / "run"
    requests = [
        asked(tmp_path / "bare"),
        asked(run, tmp_path / "bare"),
        asked(run, tmp_path / "wide"),
        asked(tmp_path / "skip", tmp_path / "noskip"),
        asked(run, tmp_path / "shifted"),
        asked(run, grid=(99999, 99999)),
        asked(run, limit=1e-9),
    ]
    with locked(run / ".free"):
        found = ranks(1, refusals, requests)[0]
    expected = [
        "has no checkpoint yet",
        "has no checkpoint yet",
        "different models: features.0.0.weight is [4, 1, 3, 3] in the first and [5,",
        "{'skip': False}",
        "prepare their images differently: data.mean (4.0,) and (5.0,)",
        "--points 99999x99999: 9,999,800,011 evaluations take about",
        "more than the 1e-09 s allowed",
    ]
    for text, part in zip(found, expected, strict=True):
        assert part in text and "\n" not in text, (text, part)
    (run / "landscape").mkdir(exist_ok=True)
    with locked(run / "landscape" / ".lock"):
        assert "another process computes" in ranks(1, refusals, [asked(run)])[0][0]


@pytest.mark.parametrize("names", [("a/run", "b/run"), ("a/one", "a/two")])
def test_equal_names_of_folders_get_numbers(tmp_path: Path, names: tuple[str, str]) -> None:
    found = asked(tmp_path / names[0], tmp_path / names[1]).names()
    assert found == (["run (1)", "run (2)"] if "run" in names[0] else ["one", "two"])
    assert asked(tmp_path / "run").names() == ["run"]
