"""How long does it take to start two ranks, sum one number, and exit?

The same small script runs under each launcher. Its time is from the start of the command to its
end, including torch's import in every rank. Scripts differ only in how the ranks find each other,
and each launcher is measured in its best way:

| contender | what it is |
|---|---|
| import torch | no launcher, no ranks: the minimum for any program that uses torch |
| torchrun, env:// | torch's own launcher and rendezvous |
| allstep run, env:// | the same file, unchanged |
| allstep run, allstep.init() | allstep's own way: the store is in the launcher |
| mpirun, mpi4py + env:// | rank and size from mpi4py; MASTER_ADDR and MASTER_PORT are given |
| mpirun, allstep.init() | MPI only starts the ranks; they find each other through a file |

All contenders get one turn before any of them gets the next, so that a busy moment of the machine
affects all of them. The first turn warms the disk cache and is not counted.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from allstep.bench.result import Missing, Result, Row
from allstep.errors import AllstepError
from allstep.world import LAUNCHERS

_IMPORT = "import torch"
_TORCHRUN = "torchrun, env://"
_SECONDS_PER_RUN = 120.0

_ADD_UP = """\
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == 2, f"the sum over two ranks is {ones.item()}"
"""
_TORCH = f"""\
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
{_ADD_UP}
dist.destroy_process_group()
"""
_ALLSTEP = f"""\
import torch
import torch.distributed as dist
import allstep
allstep.init()
{_ADD_UP}
allstep.shutdown()
"""
_MPI4PY = f"""\
import os
from mpi4py import MPI
os.environ["RANK"] = str(MPI.COMM_WORLD.Get_rank())
os.environ["WORLD_SIZE"] = str(MPI.COMM_WORLD.Get_size())
{_TORCH}"""

_SCRIPTS = {"with_env.py": _TORCH, "with_allstep.py": _ALLSTEP, "with_mpi4py.py": _MPI4PY}
Progress = Callable[[str], None]


class LaunchFailed(AllstepError):
    """A contender ended with an error."""


@dataclass(frozen=True)
class LaunchContender:
    """A command to time.

    `script` is a name of `_SCRIPTS`, or empty; `missing` is the reason why it cannot run here.
    """

    name: str
    command: tuple[str, ...]
    script: str = ""
    missing: str = ""


def contenders() -> list[LaunchContender]:
    """Return all contenders in the table's order, including those that are not installed."""
    python = sys.executable
    allstep = (python, "-m", "allstep", "run", "-np", "2", python)
    torchrun = (python, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    mpirun = (*mpirun_command(), python)
    no_mpirun = "" if shutil.which("mpirun") else "mpirun is not installed"
    no_mpi4py = no_mpirun or ("" if find_spec("mpi4py") else "mpi4py is not installed")
    return [
        LaunchContender(_IMPORT, (python, "-c", "import torch")),
        LaunchContender(_TORCHRUN, torchrun, "with_env.py"),
        LaunchContender("allstep run, env://", allstep, "with_env.py"),
        LaunchContender("allstep run, allstep.init()", allstep, "with_allstep.py"),
        LaunchContender("mpirun, mpi4py + env://", mpirun, "with_mpi4py.py", no_mpi4py),
        LaunchContender("mpirun, allstep.init()", mpirun, "with_allstep.py", no_mpirun),
    ]


def mpirun_command() -> tuple[str, ...]:
    """Return the command of mpirun for two ranks.

    Open MPI counts cores and refuses root without these options; MPICH does neither and does not
    know them.
    """
    if "Open MPI" not in output_of("mpirun", "--version"):
        return ("mpirun", "-np", "2")
    as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    return ("mpirun", *as_root, "--oversubscribe", "-np", "2")


def output_of(*command: str) -> str:
    """Return the standard output of a command, or "" if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def measure_launch(repetitions: int = 5, progress: Progress = lambda name: None) -> Result:
    """Time every contender `repetitions` times after a warm-up.

    `progress` is called with the name of the contender before each of its turns.
    """
    with tempfile.TemporaryDirectory(prefix="allstep-bench-") as folder:
        for name, text in _SCRIPTS.items():
            (Path(folder) / name).write_text(text)
        every = [_warm_up(contender, Path(folder), progress) for contender in contenders()]
        present = [contender for contender in every if not contender.missing]
        seconds: dict[str, list[float]] = {contender.name: [] for contender in present}
        for _ in range(repetitions):
            for contender in present:
                progress(contender.name)
                seconds[contender.name].append(_time(contender, Path(folder)))
    rows = tuple(Row(name, tuple(taken)) for name, taken in seconds.items())
    missing = tuple(Missing(each.name, each.missing) for each in every if each.missing)
    return Result("launch", rows, missing, {"torchrun": _TORCHRUN, "import": _IMPORT})


def _warm_up(contender: LaunchContender, folder: Path, progress: Progress) -> LaunchContender:
    """Return the contender after its first turn.

    A contender under mpirun that fails in this turn, for example because mpi4py was built for
    another MPI, becomes a missing one.
    """
    if contender.missing:
        return contender
    progress(contender.name)
    try:
        _time(contender, folder)
    except LaunchFailed as error:
        if not contender.command[0].endswith("mpirun"):
            raise
        return replace(contender, missing=f"it fails here: {str(error).splitlines()[-1]}")
    return contender


def _time(contender: LaunchContender, folder: Path) -> float:
    """Return the seconds from the start of the command to its end."""
    script = [str(folder / contender.script)] if contender.script else []
    env = environment_of(contender)
    started = time.perf_counter()
    process = subprocess.Popen(
        [*contender.command, *script],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_SECONDS_PER_RUN)
    except subprocess.TimeoutExpired:
        raise LaunchFailed(
            f"{contender.name} was not done after {_SECONDS_PER_RUN:.0f} s"
        ) from None
    finally:
        end(process)
    taken = time.perf_counter() - started
    if process.returncode:
        raise LaunchFailed(
            f"{contender.name} ended with status {process.returncode}:\n{output.strip()}"
        )
    return taken


def end(process: subprocess.Popen[str]) -> None:
    """End a launcher and its ranks: SIGTERM, which launchers pass on, then SIGKILL.

    This leaves no process behind when the bench is interrupted.
    """
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment_of(contender: LaunchContender) -> Mapping[str, str]:
    """Return the environment without variables of a launcher around this process.

    For scripts that need an address to meet, it has one.
    """
    foreign = {name for launcher in LAUNCHERS.values() for names in launcher[1:] for name in names}
    env = {name: value for name, value in os.environ.items() if name not in foreign}
    if contender.script == "with_mpi4py.py":
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    return env


def free_port() -> int:
    """Return a free port below the kernel's ephemeral ones, so that it is still free for rank 0."""
    while True:
        port = random.randrange(15000, 32000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
