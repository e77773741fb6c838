"""A run that was written before the package was restructured: resumed, evaluated and reported.

`old_run/run` stopped after 2 of 4 epochs; `weights-N.safetensors` are those with which that version
ended it, with N workers. On one machine the files are equal byte for byte; processors differ in the
last digits, so the test compares numbers, in float64.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from allstep import runlog
from allstep.cli.app import app
from allstep.train.run.train_request import TrainRequest
from allstep.train.run.worker import work
from support.ranks import Ranks

OLD = Path(__file__).parent / "old_run"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_it_is_resumed_to_the_same_weights(tmp_path: Path, ranks: Ranks, num_workers: int) -> None:
    run = tmp_path / "run"
    shutil.copytree(OLD / "run", run)
    ranks(
        num_workers,
        work,
        TrainRequest(str(run / "config.yaml"), out=run, resume=True, must_exist=True),
    )
    found = load_file(run / "checkpoints" / "000000005348" / "weights.safetensors")
    expected = load_file(OLD / f"weights-{num_workers}.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)
    end = runlog.read(run / "run.jsonl").end
    assert end is not None and end["samples"] == 5348
    assert (run / "config.yaml").read_text() == (OLD / "run" / "config.yaml").read_text()
    if num_workers == 1:
        command = [sys.executable, "-m", "allstep", "eval", str(run), "--workers", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
        assert (run / "report.html").exists()


def test_it_predicts_before_it_is_resumed(tmp_path: Path) -> None:
    shutil.copytree(OLD / "run", tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
