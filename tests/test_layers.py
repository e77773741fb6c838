"""The order of the layers, held by import-linter; and proof that the linter would see a wrong
import."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("processes")

ROOT = Path(__file__).parent.parent


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    linter = Path(sys.executable).parent / "lint-imports"
    command = [str(linter), "--no-cache", "--config", str(folder / "pyproject.toml")]
    return subprocess.run(command, cwd=folder / "src", capture_output=True, text=True, timeout=150)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_layers_hold() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        (
            "wire.py",
            "from allstep.world import World",
            "allstep.wire is not allowed to import allstep.world",
        ),
        (
            "data/order.py",
            "def late():\n    import allstep.train",
            "allstep.data is not allowed to import allstep.train",
        ),
        ("world/value.py", "import numpy", "allstep.world is not allowed to import numpy"),
        (
            "comm/join/barrier.py",
            "from allstep.comm.group import plan",
            "allstep.comm.join is not allowed to import allstep.comm.group",
        ),
        (
            "data/random/keys.py",
            "def late():\n    import allstep.data.sets.load",
            "allstep.data.random is not allowed to import allstep.data.sets",
        ),
        (
            "train/config/run_config.py",
            (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from allstep.train.run"
                " import loop"
            ),
            "allstep.train.config is not allowed to import allstep.train.run",
        ),
        (
            "train/step/step.py",
            "def late():\n    import allstep.torch",
            "allstep.train is not allowed to import allstep.torch",
        ),
        ("drawer.py", "", "allstep.drawer"),
    ],
)
def test_a_wrong_import_fails(copy: Path, file: str, line: str, complaint: str) -> None:
    with (copy / "src/allstep" / file).open("a") as source:
        source.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode != 0
    assert complaint in result.stdout.replace("\n", " "), result.stdout
