"""allstep.init() under launchers that are not ours, for real: mpirun, hydra, srun, torchrun, on one
host and on two."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from allstep.comm.join import rendezvous
from allstep.errors import WorldError
from support.hosts import SshHosts
from support.ranks import clean_environment
from support.slurm import Slurm

HELLO = """
import json, os, sys
{before}
import allstep, torch, torch.distributed as dist
world = allstep.init()
total = torch.tensor([float(world.rank)])
dist.all_reduce(total)
sys.stdout.write("WORLD " + json.dumps([world.rank, world.size, world.local_rank, world.local_size, world.cross_rank,
                                        world.cross_size, world.launcher, total.item(), torch.get_num_threads()]) + "\\n")
"""
MPIRUN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def script(tmp_path: Path):
    def write(before: str = "") -> str:
        path = tmp_path / "hello.py"
        path.write_text(HELLO.format(before=before))
        return str(path)

    return write


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")


def call(command: Sequence[str], runtime: Path, **env: str) -> subprocess.CompletedProcess[str]:
    settings = {
        **clean_environment(),
        "XDG_RUNTIME_DIR": str(runtime),
        "PATH": os.environ["PATH"] + ":/usr/sbin",
        **env,
    }
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=150)


def worlds(done: subprocess.CompletedProcess[str]) -> list[list]:
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(
        json.loads(line.partition("WORLD ")[2])
        for line in done.stdout.splitlines()
        if "WORLD " in line
    )


def two(launcher: str) -> list[list]:
    return [[0, 2, 0, 2, 0, 1, launcher, 1.0], [1, 2, 1, 2, 0, 1, launcher, 1.0]]


@pytest.mark.usefixtures("peers")
def test_hydra_on_one_host(script, runtime: Path) -> None:
    need("mpiexec.hydra")
    found = worlds(call(["mpiexec.hydra", "-np", "2", sys.executable, script()], runtime))
    assert [world[:8] for world in found] == two("mpich")
    assert list((runtime / "allstep").iterdir()) == []  # the file goes when all are connected


@pytest.mark.usefixtures("peers")
def test_a_file_that_a_killed_run_left_does_not_mislead(script, runtime: Path) -> None:
    """The same job name again, with a file of a process that is gone."""
    need("mpirun.openmpi")
    folder = runtime / "allstep"
    folder.mkdir(mode=0o700)
    gone = subprocess.Popen(["true"])
    gone.wait()
    note = json.dumps({"port": 1, "token": "old", "pid": gone.pid, "born": 1})
    before = (
        "import time\n"
        "from pathlib import Path\n"
        "from allstep.world import World, job_of\n"
        f"file = Path({str(folder)!r}) / (job_of(World.detect()) + '.json')\n"
        f"if os.environ['OMPI_COMM_WORLD_RANK'] == '1': file.write_text({note!r})\n"
        "else:\n    while not file.exists(): time.sleep(0.01)\n"
    )
    (folder / "other-job.json").write_text(note)
    found = worlds(call([*MPIRUN, "-np", "2", sys.executable, script(before)], runtime))
    assert [world[:8] for world in found] == two("openmpi")
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("peers")
def test_a_rank_that_does_not_turn_up_under_mpirun(script, runtime: Path) -> None:
    need("mpirun.openmpi")
    before = "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': sys.exit(0)"
    done = call(
        [*MPIRUN, "-np", "2", sys.executable, script(before)], runtime, ALLSTEP_START_TIMEOUT="1"
    )
    assert done.returncode != 0
    assert re.search(r"1 of 2 ranks did not join within \d+ s: rank 1 on ", done.stderr)
    none = "if os.environ['OMPI_COMM_WORLD_RANK'] == '0': sys.exit(0)"
    done = call(
        [*MPIRUN, "-np", "2", sys.executable, script(none)], runtime, ALLSTEP_START_TIMEOUT="1"
    )
    assert "rank 0 did not join" in done.stderr


@pytest.mark.usefixtures("peers")
def test_somebody_elses_folder_is_not_trusted(script, runtime: Path) -> None:
    need("mpirun.openmpi")
    (runtime / "allstep").mkdir(mode=0o777)
    (runtime / "allstep").chmod(0o777)
    done = call([*MPIRUN, "-np", "1", sys.executable, script()], runtime)
    assert done.returncode != 0
    assert "must be a folder that belongs to you alone" in done.stderr


def test_srun_on_one_host(slurm: Slurm, script, runtime: Path) -> None:
    found = worlds(call(["srun", "-n", "2", sys.executable, script()], runtime, **slurm.env))
    assert [world[:8] for world in found] == two("slurm")
    assert list((runtime / "allstep").iterdir()) == []


def test_srun_on_two_hosts(slurm_two_nodes: Slurm, script, runtime: Path) -> None:
    done = slurm_two_nodes.run(
        ["srun", "-N", "2", "-n", "3", "--ntasks-per-node", "2", sys.executable, script()],
        timeout=150,
    )
    assert [world[:8] for world in worlds(done)] == [
        [0, 3, 0, 2, 0, 2, "slurm", 3.0],
        [1, 3, 1, 2, 0, 1, "slurm", 3.0],
        [2, 3, 0, 1, 1, 2, "slurm", 3.0],
    ]


@pytest.mark.usefixtures("peers")
def test_torchrun_with_an_agents_store(script, runtime: Path) -> None:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    found = worlds(call([torchrun, "--nproc-per-node", "2", script()], runtime))
    assert [world[:8] for world in found] == two("torchrun")
    # torchrun sets OMP_NUM_THREADS=1 by itself; the ranks take their share of the cores all the
    # same.
    assert {world[8] for world in found} == {max(1, len(os.sched_getaffinity(0)) // 2)}


# Each rank but the first has a slow answer to the question whether all are here; the first ends at
# once.
LATE = """
import os, time
import allstep
from allstep.comm.group import joined as start
collect = start.collect
def late(store, prefix, rank, size, word, *rest):
    if rank and not word:
        store.set(f"{prefix}/{rank}", word)
        time.sleep(1.0)
    return collect(store, prefix, rank, size, word, *rest)
start.collect = late
world = allstep.init()
if world.rank == 0:
    os._exit(0)
print("JOINED", world.rank)
"""


@pytest.mark.usefixtures("peers")
def test_rank_0_does_not_leave_before_all_have_joined(tmp_path: Path, runtime: Path) -> None:
    """It serves the store where no launcher of ours does."""
    need("mpirun.openmpi")
    path = tmp_path / "late.py"
    path.write_text(LATE)
    done = call([*MPIRUN, "-np", "2", sys.executable, str(path)], runtime)
    assert done.stdout.count("JOINED") == 1, done.stdout + done.stderr


@pytest.mark.usefixtures("processes")
def test_variables_set_by_hand(script, runtime: Path) -> None:
    done = call([sys.executable, script()], runtime, RANK="0", WORLD_SIZE="2")
    assert "MASTER_ADDR and MASTER_PORT is not" in done.stderr
    late = call(
        [sys.executable, script()],
        runtime,
        RANK="1",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        ALLSTEP_START_TIMEOUT="1",
    )
    assert "found no store within 1 s at MASTER_ADDR:MASTER_PORT = 127.0.0.1:1" in late.stderr
    odd = call(
        [sys.executable, script()],
        runtime,
        RANK="1",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="x",
    )
    assert "MASTER_PORT='x': expected the number of a port, 1 to 65535" in odd.stderr


def test_a_runtime_folder_that_is_a_file_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for chosen in ("/dev/null", str(tmp_path / "missing"), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", chosen)
        assert rendezvous.runtime_folder() == tmp_path / f"allstep-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert rendezvous.runtime_folder() == tmp_path / "allstep"


@pytest.mark.parametrize("squatter", ["folder", "file", "link", "pipe"])
def test_another_user_who_takes_the_name_in_a_shared_folder_blocks_no_run(
    squatter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    taken = tmp_path / f"allstep-{os.getuid()}"
    if squatter == "folder":
        taken.mkdir()
        taken.chmod(0o777)
    elif squatter == "file":
        taken.touch()
    elif squatter == "link":
        taken.symlink_to(tmp_path / "nothing")
    else:
        os.mkfifo(taken)
    folder = rendezvous.runtime_folder()
    assert folder.is_relative_to(tmp_path / "cache") and folder.stat().st_mode & 0o777 == 0o700
    assert rendezvous.runtime_folder() == folder
    folder.chmod(0o777)
    with pytest.raises(WorldError, match=r"belongs to you alone.*set XDG_RUNTIME_DIR"):
        rendezvous.runtime_folder()


@pytest.mark.parametrize("text", ["0", "99999", "-1", "1.5", " 80", "0x50", "\u0663", "1" * 5000])
def test_a_port_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", text)
    with pytest.raises(WorldError, match="expected the number of a port"):
        rendezvous._master_port()


# Open MPI on two hosts. A wheel of mpi4py finds Open MPI's library; where it cannot be imported,
# MASTER_ADDR must be given.


def mpirun_on(hosts: SshHosts, *more: str) -> list[str]:
    need("mpirun.openmpi")
    tcp = ["-mca", "btl_tcp_if_include", "eth0", "-mca", "oob_tcp_if_include", "eth0"]
    return [
        *hosts.prefix(0),
        *MPIRUN,
        "-mca",
        "plm_rsh_agent",
        hosts.ssh,
        *tcp,
        "-np",
        "3",
        "-H",
        "h1:2,h2:1",
        *more,
    ]


UNEVEN = [
    [0, 3, 0, 2, 0, 2, "openmpi", 3.0],
    [1, 3, 1, 2, 0, 1, "openmpi", 3.0],
    [2, 3, 0, 1, 1, 2, "openmpi", 3.0],
]


def test_mpirun_on_two_hosts_with_mpi4py(two_hosts: SshHosts, script, runtime: Path) -> None:
    pytest.importorskip("mpi4py")
    found = worlds(call([*mpirun_on(two_hosts), sys.executable, script()], runtime))
    assert [world[:8] for world in found] == UNEVEN


def test_mpirun_on_two_hosts_without_mpi4py(two_hosts: SshHosts, script, runtime: Path) -> None:
    without = "sys.modules['mpi4py'] = None"
    asked = call([*mpirun_on(two_hosts), sys.executable, script(without)], runtime)
    assert asked.returncode != 0
    assert "set MASTER_ADDR" in asked.stderr
    told = call(
        [
            *mpirun_on(two_hosts, "-x", f"MASTER_ADDR={two_hosts.addresses[0]}"),
            sys.executable,
            script(without),
        ],
        runtime,
    )
    assert [world[:8] for world in worlds(told)] == UNEVEN
