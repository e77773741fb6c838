"""`allstep scale`: one real run, and bad input."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.errors import ConfigError

PNG = b"\x89PNG"


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(400)
def test_two_numbers_of_workers_are_measured(tmp_path: Path) -> None:
    """How fast they are depends on this machine; that the figures belong together does not."""
    file, plot, out = tmp_path / "scale.json", tmp_path / "scale.png", tmp_path / "study"
    command = ["scale", "digits", "--workers", "1,2", "--rounds", "1", "--seconds", "0.5"]
    command += ["--out", str(out), "--json", str(file), "--plot", str(plot)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    one, two = json.loads(file.read_text())["rows"]
    assert (one["workers"], two["workers"], one["batch"], two["batch"]) == (1, 2, 64, 64)
    assert two["efficiency"] == pytest.approx(two["ratios"][0] / 2)
    for row in (one, two):
        assert sum(row["parts"].values()) == pytest.approx(row["step"])
        assert sum(row["loss"].values()) == pytest.approx(row["step"] - row["ideal_step"])
        assert abs(row["parts"]["rest"]) < 0.05 * row["step"]
    assert two["predicted"] > 0
    assert plot.read_bytes().startswith(PNG)
    assert "# digits: strong scaling, batch 64" in (out / "table.md").read_text()
    # The same command runs nothing, and has the same figures.
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert json.loads(file.read_text())["rows"] == [one, two]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "2,1"], "expected a rising list"),
        (["--workers", "1,65"], "a step has 64 samples, fewer than workers"),
        (["--workers", "1,2", "batch_per_worker=8"], "give --batch-per-worker"),
        (["--workers", "1,2", "--batch-per-worker", "8", "batch=8"], "give --batch-per-worker al"),
        (["--workers", "1,2", "sync=async"], "have no common step; see `study sync`"),
        (["--workers", "1,3", "-H", "h1:2"], "the hosts have 2 slots"),
        (["--workers", "1,2", "--link", "fast"], "expected a rate and perhaps a latency"),
        (["--workers", "1,2", "model.name=nothing"], "nothing"),
    ],
)
def test_bad_input(options: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["scale", "digits", "--out", str(tmp_path / "study"), *options])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not (tmp_path / "study").exists()
