"""The examples: four lines apart, and the longer one finds its world under every launcher."""

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from allstep.data import open_source
from support.ranks import clean_environment
from support.slurm import Slurm

EXAMPLES = Path(__file__).parent.parent / "examples"
BIN = Path(sys.executable).parent
SCRIPT = str(EXAMPLES / "four_lines.py")
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []


def run(*command: str, path: str = "") -> str:
    """What a command prints on standard output; it must succeed. `path`: first on PYTHONPATH."""
    env = clean_environment()
    if path:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [path, env.get("PYTHONPATH")]))
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def program(*names: str) -> str:
    """The first of these programs that is installed."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs {' or '.join(names)}")
    return found


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d\.\d+), accuracy 9\d\.\d%", output)]


@pytest.fixture(scope="module")
def alone(processes: None) -> str:
    """What both scripts print in one process, one after the other: importing torch takes most of
    their time."""
    runs = [
        f"runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
        for name in ("plain.py", "four_lines.py")
    ]
    return run(sys.executable, "-c", "\n".join(["import runpy", *runs]))


@pytest.fixture
def plain_loss(alone: str) -> float:
    return losses(alone)[0]


def check_two_ranks(output: str, launcher: str, plain_loss: float) -> None:
    """Two ranks of one host, distinguished, with the same loss at the end: that of one process, but
    for rounding."""
    places = re.findall(
        r"World\(rank=(\d+), size=(\d+), local_rank=(\d+), local_size=(\d+)", output
    )
    assert sorted(places) == [("0", "2", "0", "2"), ("1", "2", "1", "2")], output
    assert re.findall(r"launcher='(\w+)'", output) == [launcher] * 2, output
    first, second = losses(output)
    assert first == second == pytest.approx(plain_loss, abs=0.002), output


def test_the_difference_is_four_lines() -> None:
    plain, distributed = (
        (EXAMPLES / name).read_text().splitlines() for name in ("plain.py", "four_lines.py")
    )
    marks = Counter(line[0] for line in difflib.ndiff(plain, distributed))
    assert marks == {" ": len(plain), "+": 4}


def test_one_process_is_a_world_too(alone: str) -> None:
    plain, world, distributed = alone.splitlines()
    assert plain == distributed
    assert world.startswith("World(rank=0, size=1")


@pytest.mark.usefixtures("processes")
def test_records_of_the_tutorials(tmp_path: Path) -> None:
    """Written and read back; the next reader finds the same."""
    output = run(sys.executable, str(EXAMPLES / "tutorial_records.py"), str(tmp_path))
    first, tench, goldfish, hen, *batches = output.splitlines()
    assert first == "label: text, class names, numbered by sorted order (3 classes)"
    assert tench == "record 0: label tench, class 2 of goldfish, hen, tench"
    assert "label goldfish, class 0 " in goldfish and "label hen, class 1 " in hen
    targets = [
        int(number)
        for line in batches
        for number in re.findall(r"[012](?=[,\]])", line.partition("[")[2])
    ]
    assert sorted(targets) == [0] * 4 + [1] * 4 + [2] * 4
    assert open_source(tmp_path).targets().tolist() == [2, 0, 1] * 4


@pytest.mark.usefixtures("processes")
def test_rows_of_an_embedding() -> None:
    """A table of 20,000 rows instead of a million."""
    script = str(EXAMPLES / "embedding_rows.py")
    options = ["--rows", "20000", "--steps", "120"]
    output = run(str(BIN / "allstep"), "run", "-np", "2", script, *options)
    found = re.search(r"20000 rows, 2 workers: loss (\S+) -> (\S+),", output)
    assert found, output
    assert float(found[2]) < 0.8 * float(found[1])


@pytest.mark.usefixtures("processes")
def test_the_kvstore_of_mxnets_tutorial() -> None:
    script = str(EXAMPLES / "kvstore.py")
    lines = run(str(BIN / "allstep"), "run", "-np", "2", script).splitlines()
    found = Counter(line.partition("] ")[2] for line in lines)
    assert found["updated: 6.0"] == 2 and found["a list of keys: [9.0, 9.0, 9.0]"] == 2
    for name in ("dist_sync", "dist_async", "dist_stale:2"):
        assert found[f"{name} on 2 workers: -9.0"] == 1, lines


def test_under_allstep_run(plain_loss: float) -> None:
    check_two_ranks(run(str(BIN / "allstep"), "run", "-np", "2", SCRIPT), "allstep", plain_loss)


@pytest.mark.usefixtures("peers")
def test_under_torchrun(plain_loss: float) -> None:
    check_two_ranks(
        run(str(BIN / "torchrun"), "--nproc-per-node", "2", SCRIPT), "torchrun", plain_loss
    )


@pytest.mark.usefixtures("peers")
def test_under_open_mpi(plain_loss: float) -> None:
    mpirun = program("mpirun.openmpi", "mpirun")
    output = run(mpirun, *AS_ROOT, "--oversubscribe", "-np", "2", sys.executable, SCRIPT)
    check_two_ranks(output, "openmpi", plain_loss)


@pytest.mark.usefixtures("peers")
def test_under_mpich(plain_loss: float) -> None:
    check_two_ranks(
        run(program("mpiexec.hydra"), "-np", "2", sys.executable, SCRIPT), "mpich", plain_loss
    )


def test_under_slurm(slurm: Slurm, plain_loss: float) -> None:
    result = slurm.run(["srun", "-n", "2", sys.executable, SCRIPT], timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    check_two_ranks(result.stdout, "slurm", plain_loss)


HOROVOD = {
    "torch": ("torch",),
    # One pair of processes for both: importing TensorFlow takes most of their time.
    "tensorflow": ("keras", "tensorflow2"),
}


def one_after_the_other(framework: str) -> list[str]:
    """The command that runs the scripts of a framework unmodified, in one process."""
    runs = [
        f"runpy.run_path({str(EXAMPLES / f'horovod_{name}.py')!r}, run_name='__main__')"
        for name in HOROVOD[framework]
    ]
    return [sys.executable, "-c", "\n".join(["import runpy", *runs])]


def check_accuracies(output: str, framework: str) -> None:
    results = re.findall(r"(\w+) on 2 workers: loss \d\.\d+, accuracy (\S+)%", output)
    names = {"tensorflow": ["keras", "tensorflow"]}.get(framework, [framework])
    assert [name for name, _ in results] == names, output
    assert all(float(accuracy) > 80 for _, accuracy in results), output


@pytest.mark.usefixtures("processes", "peers")
@pytest.mark.parametrize("framework", HOROVOD)
def test_scripts_in_horovods_style(framework: str) -> None:
    launch = [str(BIN / "allstep"), "run", "--as-horovod", "-np", "2"]
    check_accuracies(run(*launch, *one_after_the_other(framework)), framework)


@pytest.mark.usefixtures("processes", "peers")
def test_scripts_of_tensorflow_under_open_mpi() -> None:
    """Those of torch, Keras 2 and MXNet run under it in tests/hvd, tests/keras2 and tests/mxnet."""
    mpirun = program("mpirun.openmpi", "mpirun")
    path = run(str(BIN / "allstep"), "horovod-path").strip()
    launch = [mpirun, *AS_ROOT, "--oversubscribe", "-np", "2", "-x", "PYTHONPATH"]
    check_accuracies(run(*launch, *one_after_the_other("tensorflow"), path=path), "tensorflow")
