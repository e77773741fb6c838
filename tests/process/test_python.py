"""Files in the current folder are not imported in place of installed modules."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import allstep
from allstep.process.python import run_module
from support.ranks import clean_environment

SHADOWS = ("allstep", "torch", "numpy", "rich", "json", "yaml", "typer", "cloudpickle")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "command",
    [
        ["train", "digits", "--dry-run", "--workers", "2"],
        ["verify", "digits", "--workers", "1,2"],
        ["doctor"],
    ],
    ids=lambda command: command[0],
)
def test_the_current_folder_executes_nothing(tmp_path: Path, command: list[str]) -> None:
    canary = tmp_path / "canary"
    for name in SHADOWS:
        text = f"open({str(canary)!r}, 'a').write(__name__)\nraise SystemExit(0)\n"
        (tmp_path / f"{name}.py").write_text(text)
    # As the installed command does it, without the current folder: what it starts is tested.
    done = subprocess.run(
        run_module("allstep", *command),
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert not canary.exists(), (canary.read_text(), done.stderr)
    assert done.stdout and "Traceback" not in done.stderr


@pytest.mark.usefixtures("processes")
def test_a_function_of_allstep_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"open({str(canary)!r}, 'a').write(__name__)\n")
    call = (
        f"import os, allstep; os.chdir({str(tmp_path)!r}); print(allstep.run(max, (2, 3),"
        " num_proc=2))"
    )
    command = [sys.executable, "-P", "-c", call]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=150
    )
    assert done.stdout.strip().endswith("[3, 3]"), done.stderr
    assert not canary.exists(), canary.read_text()


def test_no_module_of_ours_is_started_otherwise() -> None:
    """A new `python -m allstep...` must go through `allstep.process.python`."""
    found = []
    for path in Path(allstep.__file__).parent.rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if path.name != "interpreter.py" and re.search(r'"-m",\s*"allstep', line):
                found.append(f"{path.name}:{number}")
    # The benchmark of starting ranks measures the command as a user types it.
    assert [place for place in found if not place.startswith("launch.py")] == []
