"""How long does it take to push a gradient to a store and to pull the new weights?

| contender | what is timed, in each of the workers at once |
|---|---|
| allstep pushpull | a `dist_async` store: the worker applies its gradient in shared memory |
| allstep push+pull | the same with two calls |
| Gloo pairs | gradient and weights over a group of two for each worker and a server process |
| MXNet pushpull | a `dist_async` store of MXNet 1.9.1, with one server and a scheduler |
| MXNet push+pull | the same with two calls |
| ZeroMQ | DEALER and ROUTER on a UNIX socket, with a server that updates by numpy |

One key, SGD without momentum, one host. All processes exist during the whole benchmark, and every
worker sleeps until it receives a request on a socket. The bench sends to one contender at a time,
and all contenders get one turn before any of them gets the next: a busy moment of the machine
affects all of them, and no other contender runs while one is timed.

A turn of a worker is as many calls as fit into `_SECONDS_PER_TURN`, at least one. Each call is
timed; the result of the turn is the median call of its slowest worker. CPU time is that of all
threads of a worker, and of the server, per call. After the last turn of a size all workers check
the weights.

MXNet 1.9.1 needs an old numpy, so it and pyzmq are in an environment of their own: `how_to_get`.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from allstep import machine
from allstep.bench.comm.measure import CommFailed, Team, start_team
from allstep.bench.comm.result import KB, MB, show_size
from allstep.bench.result import Missing, Row
from allstep.bench.sync import foreign_stores
from allstep.bench.sync.result import SyncResult, SyncRow
from allstep.console import quantities
from allstep.errors import ConfigError
from allstep.files.home import cache_home
from allstep.process.python import run_module

SIZES = (4 * KB, 64 * KB, MB, 8 * MB, 32 * MB, 128 * MB)
REPETITIONS = 9
_SECONDS_PER_TURN = 0.2
_MAX_CALLS = 2000
# MXNet's processes import it one after the other; on a busy machine each import takes long.
_SECONDS_TO_START = 240.0
# Gradients and weights of a worker, the buffers of the transports, and the servers.
_COPIES = 6

Progress = Callable[[str], None]


@dataclass
class Contender:
    """A store to measure: its workers, and what they did at the present size."""

    name: str
    team: Team
    server: int | None = None
    pushes: int = 0
    seconds: list[float] = field(default_factory=list)
    worker_cpu: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)

    def prepare(self, nbytes: int) -> None:
        """Make a key, and take a turn that does not count."""
        answers = self.team.request({"name": self.name, "prepare": nbytes})
        self.server = answers[0]["server"]
        self.pushes = 0
        self.take()
        self.seconds, self.worker_cpu, self.server_cpu = [], [], []

    def take(self) -> None:
        """Take one turn."""
        before = _cpu_seconds(self.server)
        request = {"name": self.name, "measure": _MAX_CALLS, "limit": _SECONDS_PER_TURN}
        answers = self.team.request(request)
        pushes = sum(len(answer["seconds"]) for answer in answers)
        self.server_cpu.append((_cpu_seconds(self.server) - before) / pushes)
        self.worker_cpu.append(sum(answer["cpu"] for answer in answers) / pushes)
        self.seconds.append(max(median(answer["seconds"]) for answer in answers))
        self.pushes += pushes

    def row(self, nbytes: int) -> SyncRow:
        """Check the weights and return the row of the table."""
        self.team.request({"name": self.name, "check": self.pushes})
        cpu = median(self.worker_cpu), median(self.server_cpu)
        return SyncRow(nbytes, Row(self.name, tuple(self.seconds)), *cpu)


def measure_sync(
    sizes: Sequence[int] = SIZES,
    num_workers: int = 2,
    repetitions: int = REPETITIONS,
    python: Path | None = None,
    progress: Progress = lambda text: None,
) -> SyncResult:
    """Time every contender at every size.

    python: the interpreter of the environment with MXNet and pyzmq (default: `default_python`).
    `progress` is called with the current size, repetitions + 1 times for each.
    """
    rows: list[SyncRow] = []
    missing: list[Missing] = []
    with _contenders(num_workers, python, missing) as contenders:
        for nbytes in sizes:
            progress(show_size(nbytes))
            if reason := _too_large(num_workers * len(contenders), nbytes):
                missing.append(Missing(show_size(nbytes), reason))
                continue
            for each in contenders:
                each.prepare(nbytes)
            for _ in range(repetitions):
                progress(show_size(nbytes))
                for each in contenders:
                    each.take()
            rows += [each.row(nbytes) for each in contenders]
    return SyncResult(num_workers, tuple(rows), tuple(missing))


def default_python() -> Path:
    """Return the interpreter of the environment for peers."""
    return cache_home() / "peers" / "bin" / "python"


def how_to_get(python: Path) -> str:
    """Return the commands that make an environment with the peers."""
    folder = python.parent.parent
    pip = f"{folder}/bin/pip install"
    return (
        f"python3 -m venv {folder}; {pip} --no-deps mxnet==1.9.1 'graphviz<0.9';"
        f" {pip} requests pyzmq numpy==1.23.5"
    )


def check_python(python: Path | None) -> None:
    """Raise ConfigError if `python`, which the user has given, is no program."""
    if python is not None and not python.is_file():
        raise ConfigError(
            f"--mxnet {python}: no such file; expected the Python of an environment with MXNet, as"
            f" made by: {how_to_get(default_python())}"
        )


@contextlib.contextmanager
def _contenders(
    num_workers: int, python: Path | None, missing: list[Missing]
) -> Iterator[list[Contender]]:
    """Start the processes of all contenders; they end with the context."""
    count, foreign = str(num_workers), python or default_python()
    ours = run_module("allstep", "run", "-np", count, *run_module("allstep.bench.sync.store_rank"))
    pairs = run_module("allstep.bench.sync.gloo_pairs", "pairs", count)
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="allstep-bench-")))
        teams = [
            _start("allstep run", ours, num_workers, folder, ending),
            _start("Gloo pairs", pairs, num_workers, folder, ending),
        ]
        for name in ("MXNet", "ZeroMQ"):
            command = [str(foreign), "-I", foreign_stores.__file__, name.lower(), count]
            try:
                teams.append(_start(name, command, num_workers, folder, ending))
            except CommFailed as error:
                reason = str(error).splitlines()[-1]
                missing.append(Missing(name, f"{reason}; to get it: {how_to_get(foreign)}"))
        yield [Contender(name, team) for team in teams for name in team.names]


def _start(
    name: str, command: list[str], count: int, folder: Path, ending: contextlib.ExitStack
) -> Team:
    try:
        return start_team(name, command, count, folder, ending, seconds_to_start=_SECONDS_TO_START)
    except OSError as error:
        raise CommFailed(f"{command[0]}: {error.strerror or error}") from error


def _too_large(num_workers: int, nbytes: int) -> str:
    """Return why this size does not fit into memory, or "" if it does."""
    needed, free = _COPIES * num_workers * nbytes, machine.memory().available
    if needed < free:
        return ""
    return f"it needs {quantities.nbytes(needed)} of memory, {quantities.nbytes(free)} are free"


def _cpu_seconds(pid: int | None) -> float:
    """Return the CPU time of all threads of a process, exact to microseconds; 0 without one."""
    if pid is None:
        return 0.0
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9
