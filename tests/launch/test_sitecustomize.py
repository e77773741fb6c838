"""The folder's `sitecustomize`: it prepares `import mxnet`, and hides no other one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allstep.launch.horovod import FOLDER, with_horovod
from support.allstep_command import run
from support.ranks import clean_environment

pytestmark = pytest.mark.usefixtures("processes")

NAMES = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "mxnet":
            print("before mxnet")
            for finder in sys.meta_path:
                if type(finder).__name__ != 'Finder' and (spec := finder.find_spec(name, path, target)):
                    return spec

def install():
    if not any(type(finder).__name__ == 'Finder' for finder in sys.meta_path):
        print("installed")
        sys.meta_path.insert(0, Finder())
"""


def python(code: str, *folders: Path) -> str:
    """What a program prints with these folders on its PYTHONPATH."""
    env = clean_environment() | {"PYTHONPATH": ":".join(map(str, folders))}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the folder, next to a package `mxnet` of allstep that prints what it does."""
    folder = tmp_path / "copy" / "horovod_path"
    folder.mkdir(parents=True)
    shutil.copy(FOLDER / "sitecustomize.py", folder)
    (tmp_path / "copy" / "mxnet").mkdir()
    (tmp_path / "copy" / "mxnet" / "numpy_names.py").write_text(NAMES)
    return folder


@pytest.fixture
def frameworks(tmp_path: Path) -> Path:
    """A folder with a module `mxnet`."""
    folder = tmp_path / "frameworks"
    folder.mkdir()
    (folder / "mxnet.py").write_text("print('mxnet')")
    return folder


def test_the_hook_is_loaded_by_the_first_import_of_mxnet(folder: Path, frameworks: Path) -> None:
    code = "import json; print('start'); import mxnet; import mxnet; print('end')"
    assert python(code, folder, frameworks).split("\n") == [
        *("start", "installed", "before mxnet", "mxnet", "end"),
        "",
    ]


def test_a_hook_that_exists_already_is_the_only_one(folder: Path, frameworks: Path) -> None:
    """As after `import allstep.mxnet`."""
    file = folder.parent / "mxnet" / "numpy_names.py"
    code = (
        f"from pathlib import Path; exec(Path({str(file)!r}).read_text()); install(); import mxnet"
    )
    assert python(code, folder, frameworks) == "installed\nbefore mxnet\nmxnet\n"


def test_a_missing_mxnet_is_reported_as_ever(folder: Path) -> None:
    code = """
import importlib.abc, sys
class NoMXNet(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "mxnet":
            raise ModuleNotFoundError("No module named 'mxnet'", name="mxnet")
sys.meta_path.insert(2, NoMXNet())
for _ in range(2):
    try:
        import mxnet
    except ModuleNotFoundError as error:
        print(error)
"""
    expected = ["installed", *["before mxnet", "No module named 'mxnet'"] * 2]
    assert python(code, folder).splitlines() == expected


def customized(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(text)
    return folder


ASK = "import sitecustomize, sys; print(getattr(sitecustomize, 'answer', None))"


def test_the_next_one_runs_under_its_own_name(tmp_path: Path) -> None:
    """Its module is found again, it runs once, and those after it do not run, as without us."""
    text = "import sys; print(__name__, sys.modules[__name__].__file__ == __file__); answer = 42"
    mine = customized(tmp_path / "mine", text)
    later = customized(tmp_path / "later", "print('not this one')")
    assert python(ASK, FOLDER, mine, later) == "sitecustomize True\n42\n"
    assert python(ASK, FOLDER, mine, FOLDER) == "sitecustomize True\n42\n"


def test_one_that_comes_first_keeps_its_place(tmp_path: Path) -> None:
    mine = customized(tmp_path / "mine", "print('mine'); answer = 1")
    assert python(ASK, mine, FOLDER) == "mine\n1\n"


def test_two_copies_of_the_folder_end(folder: Path, tmp_path: Path) -> None:
    mine = customized(tmp_path / "mine", "print('mine'); answer = 1")
    assert python(ASK, FOLDER, folder, mine) == "mine\n1\n"
    assert python(ASK, folder, FOLDER) == "None\n"


def test_an_error_in_the_next_one_is_reported_as_ever(tmp_path: Path) -> None:
    """Python prints it and continues."""
    mine = customized(tmp_path / "mine", "raise KeyError('mine')")
    results = []
    for path in (f"{FOLDER}:{mine}", str(mine)):
        done = subprocess.run(
            [sys.executable, "-c", "print('continues')"],
            env=clean_environment() | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=100,
        )
        results.append((done.returncode, done.stdout, done.stderr))
    assert results[0] == results[1]
    assert results[0][:2] == (0, "continues\n") and "KeyError: 'mine'" in results[0][2]


def test_nothing_is_loaded_that_a_plain_start_does_not_load() -> None:
    code = (
        "import sys; print(sorted({'re', 'typing', 'numpy', 'torch', 'allstep'} & {*sys.modules}))"
    )
    assert python(code, FOLDER) == python(code)


def test_workers_of_as_horovod_have_both(tmp_path: Path) -> None:
    mine = customized(tmp_path / "mine", "answer = 42")
    command = ["-np", "1", sys.executable, "-c", ASK]
    env = {"PYTHONPATH": str(mine)}
    assert run("run", "--as-horovod", *command, env=env).out == "[0] 42\n"
    assert with_horovod(env)["PYTHONPATH"] == f"{FOLDER}:{mine}"
