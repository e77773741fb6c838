"""The worker's share of cores for TensorFlow, XLA and MXNet."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from allstep import framework_threads, machine
from support.ranks import clean_environment

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
MARK = "ALLSTEP_FRAMEWORK_THREADS"
NAMES = (
    "TF_NUM_INTRAOP_THREADS",
    "PJRT_NPROC",
    "NPROC",
    "XLA_FLAGS",
    "OMP_NUM_THREADS",
    "ALLSTEP_THREADS",
    MARK,
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of ours is set, and none stays; 4 cores are allowed."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(machine, "allowed_cores", lambda: 4)
    monkeypatch.setattr(framework_threads, "_changed", {})
    return monkeypatch


def present() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_one_thread() -> None:
    assert framework_threads.variables({}, 1) == {
        MARK: "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "PJRT_NPROC": "1",
        "XLA_FLAGS": ONE_THREAD,
    }


def test_with_more_threads_xla_may_use_them() -> None:
    assert framework_threads.variables({}, 3) == {
        MARK: "3",
        "TF_NUM_INTRAOP_THREADS": "3",
        "PJRT_NPROC": "3",
    }


@pytest.mark.parametrize(
    "env",
    [
        {"TF_NUM_INTRAOP_THREADS": "7"},
        {"PJRT_NPROC": "7"},
        {"NPROC": "7"},
        {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true"},
        {"XLA_FLAGS": "file-with-flags"},
    ],
)
def test_values_of_the_user_stay(env: dict[str, str]) -> None:
    found = framework_threads.variables(env, 1)
    assert env.keys() & found.keys() == set()
    assert "NPROC" not in env or "PJRT_NPROC" not in found, "XLA reads NPROC in second place"
    assert len(found) >= 3, "the other variables are set"


def test_flags_of_the_user_come_first() -> None:
    env = {"XLA_FLAGS": "--xla_dump_to=/x"}
    assert framework_threads.variables(env, 1)["XLA_FLAGS"] == f"--xla_dump_to=/x {ONE_THREAD}"
    assert "XLA_FLAGS" not in framework_threads.variables(env, 2)


@pytest.mark.parametrize("flags", ["", "--xla_dump_to=/x"])
def test_a_run_started_by_a_worker_sets_its_own(flags: str) -> None:
    outer = {"XLA_FLAGS": flags} if flags else {}
    inner = outer | framework_threads.variables(outer, 1)
    assert inner | framework_threads.variables(inner, 1) == inner
    assert inner | framework_threads.variables(inner, 2) == {
        MARK: "2",
        "TF_NUM_INTRAOP_THREADS": "2",
        "PJRT_NPROC": "2",
        "XLA_FLAGS": flags,
    }


@pytest.mark.parametrize(
    ("threads", "share"), [("1", "1"), ("3", "3"), ("9999", "4"), ("0", None), ("4,2", None)]
)
def test_one_number_of_the_user_counts_for_all(
    environment: pytest.MonkeyPatch, threads: str, share: str | None
) -> None:
    found = framework_threads.of_worker({"OMP_NUM_THREADS": threads})
    assert found.get("TF_NUM_INTRAOP_THREADS") == share
    assert framework_threads.of_worker({}) == {}


def test_init_sets_and_shutdown_restores(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("XLA_FLAGS", "--xla_dump_to=/x")
    framework_threads.take(1, speaks=True)
    assert present() == {
        "OMP_NUM_THREADS": "1",
        "ALLSTEP_THREADS": "1",
        MARK: "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "PJRT_NPROC": "1",
        "XLA_FLAGS": f"--xla_dump_to=/x {ONE_THREAD}",
    }
    os.environ["PJRT_NPROC"] = "2"
    framework_threads.give_back()
    assert present() == {"XLA_FLAGS": "--xla_dump_to=/x", "PJRT_NPROC": "2"}


def test_init_keeps_what_the_user_set(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OMP_NUM_THREADS", "2")
    environment.setenv("TF_NUM_INTRAOP_THREADS", "3")
    framework_threads.take(2, speaks=True)
    assert present() == {
        "OMP_NUM_THREADS": "2",
        "TF_NUM_INTRAOP_THREADS": "3",
        "PJRT_NPROC": "2",
        MARK: "2",
    }


@pytest.mark.parametrize(
    ("mine", "launchers", "quota", "share"),
    [
        (8, 8, None, 2),
        (2, 8, None, 2),
        (4, 8, None, 2),
        (1, 8, None, 1),
        (8, 2, None, 2),
        (2, 2, None, 1),
        (16, 16, 8.0, 2),
        (8, None, None, 2),
    ],
    ids=["not bound", "bound", "to a socket", "to a core", "odd", "few", "quota", "no parent"],
)
def test_the_share_of_four_workers_before_they_know_each_other(
    monkeypatch: pytest.MonkeyPatch,
    mine: int,
    launchers: int | None,
    quota: float | None,
    share: int,
) -> None:
    def mask(pid: int) -> range:
        if pid == 0:
            return range(mine)
        if launchers is None:
            raise ProcessLookupError(pid)
        assert pid == os.getppid()
        return range(launchers)

    monkeypatch.setattr(os, "sched_getaffinity", mask)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert machine.estimated_share(4) == share


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (OPEN_MPI, {"OMP_NUM_THREADS": "2", "ALLSTEP_THREADS": "2"}),
        (OPEN_MPI | {"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, {}),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "9"}, {}),
        ({"ALLSTEP_LAUNCHER": "none"}, {}),
    ],
    ids=["two workers", "the user's", "alone on its host", "contradiction", "alone"],
)
def test_before_mxnet_only_openmp_is_limited(
    environment: pytest.MonkeyPatch, env: dict[str, str], expected: dict[str, str]
) -> None:
    environment.setattr(machine, "estimated_share", lambda num_workers: 4 // num_workers)
    for name, value in env.items():
        environment.setenv(name, value)
    framework_threads.take_openmp()
    assert present() == expected
    # What was set before `init` is restored, too.
    framework_threads.take(3, speaks=False)
    user = "OMP_NUM_THREADS" in env
    assert os.environ["OMP_NUM_THREADS"] == "3"
    framework_threads.give_back()
    assert present() == ({"OMP_NUM_THREADS": "3"} if user else {})


class Threading:
    """`tensorflow.config.threading`: it accepts a number until the first operation has run."""

    def __init__(self, is_running: bool, number: int = 0) -> None:
        self.is_running, self.number = is_running, number

    def get_intra_op_parallelism_threads(self) -> int:
        return self.number

    def set_intra_op_parallelism_threads(self, number: int) -> None:
        if self.is_running:
            raise RuntimeError("Intra op parallelism cannot be modified after initialization.")
        self.number = number


def imported(environment: pytest.MonkeyPatch, threading: Threading) -> None:
    tensorflow = SimpleNamespace(config=SimpleNamespace(threading=threading))
    environment.setitem(sys.modules, "tensorflow", tensorflow)
    environment.setattr(os, "sched_getaffinity", lambda pid: range(4))


@pytest.mark.parametrize(
    ("env", "threads"),
    [({}, "4"), ({"TF_NUM_INTRAOP_THREADS": "3", MARK: "3"}, "3")],
    ids=["all cores", "from the launcher"],
)
def test_a_tensorflow_that_runs_is_reported(
    environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    env: dict[str, str],
    threads: str,
) -> None:
    imported(environment, Threading(is_running=True))
    for name, value in env.items():
        environment.setenv(name, value)
    framework_threads.take(2, speaks=True)
    printed = capsys.readouterr().err
    assert printed.startswith(f"allstep: TensorFlow already runs with {threads} threads")
    assert "share of 2" in printed and "TF_NUM_INTRAOP_THREADS=2" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("threading", "env", "share", "speaks"),
    [
        (Threading(is_running=True), {}, 4, True),
        (Threading(is_running=True), {}, 1, False),
        (Threading(is_running=True, number=3), {}, 1, True),
        (Threading(is_running=True), {"TF_NUM_INTRAOP_THREADS": "4"}, 1, True),
        (Threading(is_running=True), {"TF_NUM_INTRAOP_THREADS": "1", MARK: "1"}, 1, True),
        (Threading(is_running=False), {}, 1, True),
    ],
    ids=["all cores are ours", "another rank", "its own call", "variable", "launcher", "not yet"],
)
def test_what_is_not_reported(
    environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    threading: Threading,
    env: dict[str, str],
    share: int,
    speaks: bool,
) -> None:
    imported(environment, threading)
    for name, value in env.items():
        environment.setenv(name, value)
    framework_threads.take(share, speaks)
    assert capsys.readouterr().err == ""


def test_a_tensorflow_that_has_run_nothing_gets_its_share(environment: pytest.MonkeyPatch) -> None:
    threading = Threading(is_running=False)
    imported(environment, threading)
    framework_threads.take(2, speaks=True)
    assert threading.number == 2
    environment.setenv("TF_NUM_INTRAOP_THREADS", "3")
    threading.number = 0
    framework_threads.take(1, speaks=True)
    assert threading.number == 0, "the user's variable counts"


REAL = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
tf.ones(3) + 1
import allstep.torch as hvd
hvd.init()
print(os.environ["TF_NUM_INTRAOP_THREADS"], tf.config.threading.get_intra_op_parallelism_threads())
hvd.shutdown()
print(os.environ.get("TF_NUM_INTRAOP_THREADS"))
"""


@pytest.mark.usefixtures("processes", "peers")
def test_with_the_real_tensorflow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REAL],
        env={**clean_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    cores = len(os.sched_getaffinity(0))
    assert done.stdout == "1 0\nNone\n", done.stderr
    notice = f"allstep: TensorFlow already runs with {cores} threads in each worker"
    assert (notice in done.stderr) is (cores > 1), done.stderr
