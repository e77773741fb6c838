"""The wheel, not the checkout: built, installed into an empty environment with everything it needs,
and run from another folder."""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.timeout(240)  # installing torch takes most of it


def run(*command: str, cwd: Path, seconds: float = 60) -> str:
    """What a command prints on standard output; it must succeed.

    Nothing of this process's Python is handed down.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    result = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
        cwd=folder,
    )
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Iterator[Path]:
    """The programs of an environment that was empty before; pytest would keep its gigabyte, so it
    goes at once."""
    with tempfile.TemporaryDirectory(prefix="allstep-wheel-") as folder:
        venv = Path(folder) / "venv"
        run(sys.executable, "-m", "venv", "--without-pip", str(venv), cwd=Path(folder))
        pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
        install = [
            "install",
            "--quiet",
            "--no-compile",
            "--constraint",
            str(ROOT / "constraints.txt"),
            str(wheel),
        ]
        run(*pip, *install, cwd=Path(folder), seconds=200)
        yield venv / "bin"


def test_it_is_pure_python_and_whole(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {"allstep/py.typed", "allstep/report/templates/page.html"} <= set(names)
    assert "allstep/gloo_path/allstep_replace_gloo-1.dist-info/entry_points.txt" in names, (
        "torch looks for it"
    )
    digits = [
        name
        for name in names
        if name.startswith("allstep/data/sets/digits/") and name.endswith(".gz")
    ]
    assert len(digits) == 4
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "allstep"
    }  # no tests, no examples
    mode = archive.getinfo("allstep/horovod_path/bin/horovodrun").external_attr >> 16
    assert mode & 0o777 == 0o755, "job scripts call it"


def test_it_works_where_it_was_installed(installed: Path, tmp_path: Path) -> None:
    python, allstep = str(installed / "python"), str(installed / "allstep")
    assert run(allstep, "--version", cwd=tmp_path).startswith("allstep ")
    paths = run(
        python,
        "-c",
        "import allstep, sys; print(allstep.__file__, *sys.path, sep='\\n')",
        cwd=tmp_path,
    )
    assert paths.startswith(str(installed.parent))
    assert str(ROOT) not in paths

    printed = run(
        allstep,
        "run",
        "-np",
        "2",
        "python",
        "-c",
        "import allstep; print(allstep.init())",
        cwd=tmp_path,
    )
    assert "[0] World(rank=0, size=2" in printed
    assert "[1] World(rank=1, size=2" in printed

    run(allstep, "train", "digits", "epochs=2", "--workers", "2", "--out", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "run.jsonl").read_text().count('"kind": "end"') == 1
