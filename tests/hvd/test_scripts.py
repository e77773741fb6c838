"""Scripts written for Horovod run unchanged: under `allstep run --as-horovod`, under mpirun and
under torchrun."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allstep.launch.horovod import FOLDER
from support.allstep_command import run as allstep
from support.hosts import Hosts
from support.ranks import clean_environment
from support.slurm import Slurm

HERE = Path(__file__).parent.parent / "hvd_scripts"
BIN = Path(sys.executable).parent
DIGITS = FOLDER.parent / "data" / "sets" / "digits"
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []

SOAK = bool(os.environ.get("ALLSTEP_SOAK"))

pytestmark = pytest.mark.timeout(320)


class Launcher:
    """How a script's ranks are started.

    Each gives the lines that they print, without prefixes; the script must succeed.
    """

    def __call__(
        self, script: str, *arguments: object, num_workers: int = 2, cwd: Path | None = None
    ) -> list[str]:
        raise NotImplementedError


class Allstep(Launcher):
    """`allstep run --as-horovod`; nothing may be complained of."""

    def __call__(
        self, script: str, *arguments: object, num_workers: int = 2, cwd: Path | None = None
    ) -> list[str]:
        command = ["python", str(HERE / script), *map(str, arguments)]
        done = allstep("run", "--as-horovod", "-np", str(num_workers), *command, cwd=cwd, limit=150)
        assert done.code == 0, done.out + done.err
        assert done.err == ""
        return [line.partition("] ")[2] for line in done.out.splitlines()]


class Mpirun(Launcher):
    def __call__(
        self, script: str, *arguments: object, num_workers: int = 2, cwd: Path | None = None
    ) -> list[str]:
        mpirun = (
            shutil.which("mpirun.openmpi") or shutil.which("mpirun") or pytest.skip("needs mpirun")
        )
        start = [mpirun, *AS_ROOT, "--oversubscribe", "-np", str(num_workers)]
        return under(*start, sys.executable, HERE / script, *arguments, cwd=cwd)


class Torchrun(Launcher):
    def __call__(
        self, script: str, *arguments: object, num_workers: int = 2, cwd: Path | None = None
    ) -> list[str]:
        start = [
            BIN / "torchrun",
            "--nproc-per-node",
            num_workers,
            "--no-python",
        ]  # by itself it starts `python -u`
        return under(*start, sys.executable, HERE / script, *arguments, cwd=cwd)


def under(*command: object, cwd: Path | None = None) -> list[str]:
    """The lines of a launcher that is not ours, with the folder of `allstep horovod-path` on
    PYTHONPATH.

    These launchers let ranks write into each other's lines; what a rank holds back until its end
    comes out whole.
    """
    env = {**clean_environment(), "PYTHONPATH": str(FOLDER), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [*map(str, command)], env=env, cwd=cwd, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def launched(other: Launcher) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """By allstep and by one other launcher; in the soak by all.

    Each start of ranks takes seconds.
    """
    launchers = [Allstep(), Mpirun(), Torchrun()] if SOAK else [Allstep(), other]
    by_all = pytest.mark.parametrize("run", launchers, ids=lambda each: type(each).__name__.lower())
    return lambda function: pytest.mark.soak(1)(by_all(function))


def matches(lines: list[str], pattern: str) -> list[tuple[str, ...]]:
    return sorted(found.groups() for line in lines if (found := re.fullmatch(pattern, line)))


def equal_weights(lines: list[str], num_workers: int = 2) -> None:
    """Every rank ended with the same weights."""
    found = matches(lines, r"rank (\d) of (\d): checksum (-?\d+\.\d+)")
    assert [(rank, size) for rank, size, _ in found] == [
        (str(rank), str(num_workers)) for rank in range(num_workers)
    ]
    assert len({checksum for *_, checksum in found}) == 1, lines


def accuracies(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"Accuracy: ([\d.]+)%", line))]


@pytest.mark.usefixtures("peers")
@launched(Mpirun())
def test_mnist(run: Launcher) -> None:
    options = (
        [] if isinstance(run, Allstep) else ["--fp16-allreduce", "--gradient-predivide-factor", 2]
    )
    lines = run("mnist.py", "--data-dir", DIGITS, *options)
    equal_weights(lines)
    found = accuracies(lines)
    assert len(found) == 4
    assert found[-1] > 90, found


@pytest.mark.usefixtures("peers")
@launched(Torchrun())
def test_imagenet_warms_up_and_resumes(run: Launcher, tmp_path: Path) -> None:
    lines = run("imagenet.py", "--epochs", 2, cwd=tmp_path)
    equal_weights(lines)
    rates = [
        float(rate)
        for *_, rate in matches(lines, r"epoch (\d): loss ([\d.]+) accuracy ([\d.]+) lr ([\d.]+)")
    ]
    assert rates == pytest.approx(
        [0.0375, 0.05]
    )  # base 0.0125 x 2 ranks x 2 passes, half of the way from 1/2 to 1, then all
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-1.pth.tar",
        "checkpoint-2.pth.tar",
    ]
    again = run("imagenet.py", "--epochs", 4, cwd=tmp_path)
    equal_weights(again)
    assert matches(again, r"rank (\d) starts at epoch (\d)") == [("0", "2"), ("1", "2")]
    epochs = matches(again, r"epoch (\d): loss ([\d.]+) accuracy ([\d.]+) lr ([\d.]+)")
    assert [epoch for epoch, *_ in epochs] == ["2", "3"]
    assert float(epochs[-1][2]) > 60  # of four corners


@pytest.mark.usefixtures("peers")
@launched(Mpirun())
def test_synthetic_benchmark(run: Launcher) -> None:
    lines = run("synthetic_benchmark.py", "--fp16-allreduce")
    assert lines[:4] == [
        "Batch size: 16",
        "Number of CPUs: 2",
        "Running warmup...",
        "Running benchmark...",
    ]
    ((each, _),) = matches(lines, r"Img/sec per CPU: ([\d.]+) \+-([\d.]+)")
    ((both, _),) = matches(lines, r"Total img/sec on 2 CPU\(s\): ([\d.]+) \+-([\d.]+)")
    assert float(both) == pytest.approx(2 * float(each), abs=0.2)
    assert float(each) > 0


@pytest.mark.usefixtures("peers")
@launched(Torchrun())
def test_uneven_data_with_join(run: Launcher) -> None:
    lines = run("uneven.py", num_workers=3)
    # 2 batches of all three ranks, 3 of two, 3 of one, each with gradient 1 and rate 0.5: 0.5 * (2
    # + 3 * 2/3 + 3 * 1/3) = 2.5.
    assert matches(lines, r"rank (\d) epoch (\d): last joined (\d), weight (-?[\d.]+)") == [
        (str(rank), str(epoch), "2", weight)
        for rank in range(3)
        for epoch, weight in enumerate(("-2.500000", "-5.000000"))
    ]
    assert matches(lines, r"rank (\d): (\d+) batches") == [(str(rank), "15") for rank in range(3)]


@pytest.mark.usefixtures("peers")
@launched(Mpirun())
def test_process_sets(run: Launcher) -> None:
    lines = run("process_sets.py", num_workers=3)
    sums = "all [2.0, 1.0, 2.0]"
    assert sorted(line for line in lines if "sum" in line) == [
        f"rank 0: set 1 [0, 2] sum 2, {sums}",
        f"rank 1: set 2 [1] sum 1, {sums}",
        f"rank 2: set 1 [0, 2] sum 2, {sums}",
    ]
    assert {line.partition(": ")[2] for line in lines if "same" in line} == {
        "same as 0 [True, False, True]"
    }
    assert sorted(line for line in lines if "place" in line) == [
        "rank 0: place 0 of 2, {'from': 2}",
        "rank 2: place 1 of 2, {'from': 2}",
    ]
    assert sorted(line for line in lines if "removed" in line) == [
        f"rank {rank}: removed True, id None" for rank in range(3)
    ]


@pytest.mark.usefixtures("peers")
@launched(Torchrun())
def test_grouped_operations_and_gradients(run: Launcher) -> None:
    lines = run("grouped.py")
    for rank in range(2):
        assert f"rank {rank}: sums [3.0, 11.0, 2001.0, 1]" in lines
        assert f"rank {rank}: max [2.0, 6.0]" in lines
        assert f"rank {rank}: gathered [0, 1] (1, 2)" in lines
        assert f"rank {rank}: parts [{2.0 * rank}] (2, 3)" in lines
    losses = matches(lines, r"rank (\d): loss ([\d.]+)")
    assert losses[0][1] == losses[1][1]
    assert float(losses[0][1]) < 0.1


@pytest.mark.usefixtures("peers")
@launched(Mpirun())
def test_adasum(run: Launcher) -> None:
    lines = run("adasum.py")
    assert sorted(line for line in lines if "across" in line) == [
        f"rank {rank}: across [1.0, 2.0] along [4.5, 6.0]" for rank in range(2)
    ]
    (_, loss, weights), (_, _, others) = matches(
        lines, r"rank (\d): loss ([\d.]+) weights (-?[\d.]+)"
    )
    assert weights == others
    assert float(loss) < 0.05


@pytest.mark.usefixtures("peers")
@launched(Torchrun())
def test_a_gan_has_two_optimizers(run: Launcher) -> None:
    lines = run("gan.py")
    (_, x, y, weights), (_, _, _, others) = matches(
        lines, r"rank (\d): centre (-?[\d.]+) (-?[\d.]+) weights (-?[\d.]+)"
    )
    assert weights == others
    assert (float(x), float(y)) == pytest.approx((2.0, -1.0), abs=0.7)


@pytest.mark.usefixtures("peers")
@launched(Mpirun())
def test_elastic_state_is_restored_in_a_fixed_world(run: Launcher) -> None:
    lines = run("elastic.py")
    assert sorted(line for line in lines if "reset" in line) == [
        f"rank {rank}: reset at epoch 2 step 10" for rank in range(2)
    ]
    ((_, loss), (_, other)) = matches(lines, r"rank (\d): 16 steps, failed True, loss ([\d.]+)")
    assert loss == other
    assert float(loss) < 0.05


@pytest.mark.usefixtures("processes")
def test_the_rank_that_leaves_is_blamed_not_those_it_leaves_behind() -> None:
    done = allstep("run", "--as-horovod", "-np", "3", "python", HERE / "leaving.py", limit=150)
    assert done.code == 3, done.err
    assert done.last_lines.startswith(
        "allstep run: rank 1 on localhost failed first of 3: exit code 3"
    )
    assert "HorovodInternalError: Horovod has been shut down" in done.err


@pytest.mark.usefixtures("processes")
def test_one_process_needs_no_launcher() -> None:
    lines = under(
        sys.executable, str(HERE / "mnist.py"), "--data-dir", str(DIGITS), "--epochs", "2"
    )
    equal_weights(lines, 1)


def test_on_two_hosts(two_hosts: Hosts) -> None:
    where = ["-H", "h1:1,h2:2", "--ssh", two_hosts.ssh]
    done = allstep("run", "--as-horovod", *where, "python", HERE / "uneven.py", limit=150)
    assert done.code == 0, done.err
    for rank in range(3):
        assert (
            f"[{rank}] rank {rank} epoch 1: last joined 2, weight -5.000000"
            in done.out.splitlines()
        )


def test_under_slurm(slurm: Slurm) -> None:
    env = {"PYTHONPATH": str(FOLDER), "PYTHONUNBUFFERED": ""}
    done = slurm.run(
        ["srun", "-n", "2", sys.executable, str(HERE / "adasum.py")], timeout=150, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "rank 1: across [1.0, 2.0] along [4.5, 6.0]" in lines
    (_, _, weights), (_, _, others) = matches(lines, r"rank (\d): loss ([\d.]+) weights (-?[\d.]+)")
    assert weights == others
