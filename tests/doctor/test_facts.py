"""What the doctor says of this machine, against other sources of the same figures."""

import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from allstep import machine
from allstep.doctor import machine_facts, packages, programs

ONE_CORE = (
    "from allstep.doctor import machine_facts as m; c = m.cores(); print(c.affinity, c.allowed,"
    " c.machine)"
)


def test_cores() -> None:
    cores = machine_facts.cores()
    assert cores.machine == psutil.cpu_count()
    assert cores.affinity == len(os.sched_getaffinity(0))
    assert 1 <= cores.allowed <= cores.affinity


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(not shutil.which("taskset"), reason="needs taskset")
def test_cores_under_taskset() -> None:
    core = str(min(os.sched_getaffinity(0)))
    done = subprocess.run(
        ["taskset", "-c", core, sys.executable, "-c", ONE_CORE], capture_output=True, text=True
    )
    assert done.stdout.split() == ["1", "1", str(os.cpu_count())]


def test_memory() -> None:
    memory, oracle = machine.memory(), psutil.virtual_memory()
    assert abs(memory.total - oracle.total) < 0.01 * oracle.total
    assert 0 < memory.available <= oracle.available * 1.1
    assert memory.limit is None or memory.limit <= 1 << 60


@pytest.mark.parametrize(
    ("names", "stat"),
    [
        (("memory.max", "memory.current"), "anon 5\ninactive_file 300\n"),
        (
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "inactive_file 7\ntotal_inactive_file 300\n",
        ),
    ],
)
def test_memory_of_a_cgroup_does_not_count_what_the_kernel_can_drop(
    tmp_path: Path, names: tuple[str, str], stat: str
) -> None:
    for name, text in zip((*names, "memory.stat"), ("1000\n", "900\n", stat), strict=True):
        (tmp_path / name).write_text(text)
    assert machine._memory_limit(tmp_path) == 1000
    assert machine._memory_used(tmp_path) == 600


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n"])
def test_a_cgroup_without_limit(tmp_path: Path, text: str) -> None:
    (tmp_path / ("memory.max" if text == "max\n" else "memory.limit_in_bytes")).write_text(text)
    assert machine._memory_limit(tmp_path) is None


def test_shared_memory_and_open_files() -> None:
    shm = machine_facts.shared_memory()
    assert shm.size == psutil.disk_usage("/dev/shm").total
    assert shm.memfd
    assert machine_facts.open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)


def test_network() -> None:
    network = machine_facts.network()
    assert network.hostname == socket.gethostname()
    for name, found in psutil.net_if_addrs().items():
        ipv4 = [item.address for item in found if item.family == socket.AF_INET]
        if ipv4:
            assert network.interfaces[name][0] == ipv4[0]


def test_a_name_without_an_address_and_a_name_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert machine_facts.resolve("localhost")
    assert machine_facts.resolve("no such name") == []
    answered = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: answered.wait(60) and [])
    assert machine_facts.resolve("slow", seconds=0.05) is None
    answered.set()


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_facts.folder("x", tmp_path / "not" / "yet").error is None
    (tmp_path / "file").touch()
    assert "Not a directory" in str(machine_facts.folder("x", tmp_path / "file").error)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert machine_facts.folder("x", Path("/proc/none")).error


def fake(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.usefixtures("processes")
def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "mpirun", "echo 'HYDRA build details:'; echo '    Version:        4.0.2'")
    fake(tmp_path, "srun", "echo srun: no configuration source >&2; exit 1")
    fake(
        tmp_path, "nvidia-smi", "echo 'Big GPU, 80000 MiB, 550.1'; echo 'Big GPU, 80000 MiB, 550.1'"
    )
    fake(tmp_path, "ssh", "exec sleep 60")
    monkeypatch.setattr(programs, "_SECONDS", 3.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = programs.programs()
    assert found["mpirun"].version == "MPICH 4.0.2"
    assert "no Slurm is configured" in str(found["srun"].error)
    assert "did not answer" in str(found["ssh"].error)
    assert programs.gpus(found) == ["Big GPU, 80000 MiB, 550.1"] * 2
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert programs.programs()["mpirun"].path is None
    assert programs.gpus(programs.programs()) == []


@pytest.mark.usefixtures("processes")
def test_an_nvidia_smi_without_a_driver_shows_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(
        tmp_path,
        "nvidia-smi",
        "echo NVIDIA-SMI has failed, because it could not, talk to the driver; exit 9",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert programs.gpus({"nvidia-smi": programs.find("nvidia-smi")}) == []


def test_packages_are_those_that_allstep_declares() -> None:
    found = {package.name: package for package in packages.packages()}
    assert {"torch", "numpy", "rich", "mpi4py"} <= found.keys()
    assert found["torch"].version == importlib.metadata.version("torch")
    assert found["torch"].extra is None and found["torch"].least
    assert found["torch"].below and found["numpy"].below is None
    assert found["mpi4py"].extra == "mpi"
    assert "pytest" not in found


@pytest.mark.parametrize(
    ("version", "least", "good"),
    [
        ("2.13.0+cpu", "2.5", True),
        ("2.4.1", "2.5", False),
        ("10.0", "9.9", True),
        ("2.5", "2.5", True),
        ("2.5rc1", "2.5", True),
    ],
)
def test_versions(version: str, least: str, good: bool) -> None:
    assert packages.Package("x", least, version, None).good is good
