"""The page "train your own data in five commands", run as it is written, on images that are drawn
here."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image, ImageDraw

from allstep import runlog
from allstep.train import read_config
from allstep.train.config.check_config import check_config
from support.ranks import clean_environment

PAGE = (Path(__file__).parent.parent / "docs" / "own-data.md").read_text()
SHAPES = ("circle", "square", "triangle")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def drawn(shape: str, rng: np.random.Generator) -> Image.Image:
    """A light shape on a dark ground, each time of other colours, size and place."""
    image = Image.new("RGB", (48, 48), tuple(rng.integers(0, 90, 3).tolist()))
    fill = tuple(rng.integers(150, 256, 3).tolist())
    radius, (x, y) = int(rng.integers(10, 16)), rng.integers(20, 28, 2).tolist()
    left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill)
    elif shape == "square":
        draw.rectangle((left + 1, top + 1, right - 1, bottom - 1), fill)
    else:
        draw.polygon([(x, top), (left, bottom), (right, bottom)], fill)
    return image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "new").mkdir()
    for shape in SHAPES:
        (tmp_path / "photos" / shape).mkdir(parents=True)
        for number in range(100):
            drawn(shape, rng).save(tmp_path / "photos" / shape / f"{number:03}.jpg", quality=90)
        drawn(shape, rng).save(tmp_path / "new" / f"{shape}.jpg")
    (tmp_path / "mine.yaml").write_text(blocks("yaml")[0])
    return tmp_path


def run(line: str, folder: Path) -> str:
    """What a command prints; it must succeed."""
    program, *arguments = shlex.split(line)
    assert program == "allstep"
    done = subprocess.run(
        [sys.executable, "-m", "allstep", *arguments],
        cwd=folder,
        env={
            **clean_environment(),
            "OMP_NUM_THREADS": "1",
        },  # threads that spin for each other starve on a busy machine
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(600)
def test_the_page_as_it_is_written(folder: Path) -> None:
    five, more = (block.splitlines() for block in blocks("sh"))
    assert len(five) == 5
    outputs = [run(line, folder) for line in five]
    trained = runlog.read(folder / "run" / "run.jsonl").end
    assert trained is not None
    assert trained["test"]["accuracy"] > 0.9
    assert trained["test"]["count"] == 30
    assert {path.name for path in folder.iterdir()} == {
        "photos",
        "new",
        "mine.yaml",
        "packed",
        "run",
    }
    lines = outputs[-1].splitlines()
    assert [line.split()[:2] for line in lines] == [[f"new/{shape}.jpg", shape] for shape in SHAPES]

    page, score = (run(line, folder) for line in more)
    assert Path(folder / page.strip()).read_text().startswith("<!doctype html>")
    assert f"{trained['validation']['accuracy']:.2%}" in score
    assert f"{trained['validation']['loss']:.4f}" in score


def test_the_file_for_photos_is_a_config(tmp_path: Path) -> None:
    """Training by it would take hours; all keys are known and fit each other."""
    (tmp_path / "photos.yaml").write_text(blocks("yaml")[1])
    config = read_config(str(tmp_path / "photos.yaml"))
    check_config(config)
    assert (config.recipe, config.optimizer.bias_lr, config.optimizer.momentum) == (
        "defaults",
        1.0,
        0.9,
    )
    assert config.batch is None, "for the dataset's size to decide"
    assert config.model.name == yaml.safe_load(blocks("yaml")[1])["model"]
