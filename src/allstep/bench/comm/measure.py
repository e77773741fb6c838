"""How long does it take to sum a tensor over the ranks of one host?

| contender | what is timed |
|---|---|
| allstep, shared | `dist.all_reduce` of a tensor in shared memory (`allstep.comm.shared_empty`) |
| allstep, private | the same call with an ordinary tensor |
| Gloo | the same tensor, call and processes; only the process group differs |
| Open MPI | mpi4py's `Allreduce` in place, in processes of mpirun, on the same kind of memory |
| allstep, ring; allstep, tree ... | the private tensor, on a group with one fixed algorithm |

There is a row for each algorithm of `allstep.comm.network.algorithms`, over Gloo's messages instead
of shared memory. They are meant for the step between hosts; here they have no target.

MPI starts its own processes, so there are two sets of ranks, one under `allstep run` and one under
mpirun. Both exist during the whole benchmark, and every rank sleeps until it receives a message on
a socket. The bench sends to one contender at a time, and all contenders get one turn before any of
them gets the next: a busy moment of the machine affects all of them, and no other contender runs
while one is timed.

A turn is as many calls as fit into `_SECONDS_PER_TURN`, at least one, after a barrier. Each call is
timed; the result of the turn is the median call of its slowest rank. A rare call that takes
milliseconds (Gloo has them) therefore does not count; the mean of all calls, which includes it, is
in the JSON. Every sum is checked (see `rank`). There is one torch thread per rank.

Consecutive calls find the tensor in the caches, unlike in training. With `caches="written"` each
rank writes its tensor before every call; with "cold" it then also reads more than the largest cache
holds. This preparation is the same for all contenders and not timed; a barrier separates it from
the call.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import IO, Any

from allstep import machine
from allstep.bench import launch
from allstep.bench.comm.result import (
    FOREMOST,
    HOT,
    KB,
    MB,
    OPEN_MPI,
    CommResult,
    CommRow,
    show_size,
)
from allstep.bench.result import Missing, Row
from allstep.console import quantities
from allstep.errors import AllstepError
from allstep.process.python import run_module

SIZES = (4 * KB, 64 * KB, MB, 8 * MB, 32 * MB, 100 * MB, 256 * MB)
RANKS = (2, 4)
REPETITIONS = 9
_SECONDS_PER_TURN = 0.04
_MAX_CALLS = 1000
# Preparing a call may take 10 ms.
_MAX_PREPARED_CALLS = 25
_SECONDS_TO_START = 60.0
_SECONDS_TO_ANSWER = 120.0
# Tensors that a rank may hold: private, shared, MPI's, and the buffers of MPI and Gloo.
_COPIES = 4

Progress = Callable[[str], None]


class CommFailed(AllstepError):
    """Ranks of the benchmark ended, exceeded a timeout, or computed a wrong sum."""


@dataclass
class Team:
    """Ranks that one launcher started, and a connection to each."""

    name: str
    process: subprocess.Popen[str]
    output: Path
    lines: list[IO[str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    seconds_to_answer: float = _SECONDS_TO_ANSWER

    def request(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send `message` to all ranks and return their answers; raise CommFailed if one fails."""
        try:
            for line in self.lines:
                line.write(f"{json.dumps(message)}\n")
                line.flush()
            answers = [json.loads(line.readline()) for line in self.lines]
        except TimeoutError:
            late = f"did not answer {message} within {self.seconds_to_answer:.0f} s"
            raise CommFailed(f"{self.name} {late}") from None
        except (OSError, ValueError):
            raise CommFailed(f"{self.name} ended after {message}:\n{self.printed()}") from None
        for answer in answers:
            if "error" in answer:
                raise CommFailed(answer["error"])
        return answers

    def printed(self) -> str:
        """Return the output of the ranks so far."""
        return self.output.read_text(errors="replace").strip() or "no output"


def measure_comm(
    ranks: Sequence[int] = RANKS,
    sizes: Sequence[int] = SIZES,
    repetitions: int = REPETITIONS,
    progress: Progress = lambda text: None,
    caches: str = HOT,
) -> CommResult:
    """Time every contender at every size.

    `ranks` and `sizes` list numbers of ranks and bytes, `repetitions` is the number of turns of
    each contender. `progress` is called with the current combination, repetitions + 1 times for
    each. `caches` is one of `result.CACHES`: the state of the caches before a call.
    """
    rows: list[CommRow] = []
    missing: dict[str, str] = {}
    for num_ranks in ranks:
        with _teams(num_ranks, missing) as teams:
            for nbytes in sizes:
                place = f"{num_ranks} ranks, {show_size(nbytes)}"
                if reason := too_large(num_ranks, nbytes):
                    missing[place] = reason
                else:
                    turns = Turns(teams, nbytes, place, missing, caches)
                    progress(place)
                    turns.warm_up()
                    for _ in range(repetitions):
                        progress(place)
                        turns.take()
                    rows += turns.rows(num_ranks)
    return CommResult(tuple(rows), tuple(Missing(name, reason) for name, reason in missing.items()))


def too_large(num_ranks: int, nbytes: int) -> str:
    """Return why this size does not fit into memory, or "" if it does."""
    needed, free = _COPIES * num_ranks * nbytes, machine.memory().available
    if needed < free:
        return ""
    return f"it needs {quantities.nbytes(needed)} of memory, {quantities.nbytes(free)} are free"


class Turns:
    """The measurements of all contenders at one size, in the order of the table."""

    def __init__(
        self,
        teams: Sequence[Team],
        nbytes: int,
        place: str,
        missing: dict[str, str],
        caches: str = HOT,
    ) -> None:
        self._nbytes = nbytes
        self._caches = caches
        self._max_calls = _MAX_CALLS if caches == HOT else _MAX_PREPARED_CALLS
        self._seconds: dict[str, list[float]] = {}
        self._means: dict[str, list[float]] = {}
        self._calls: dict[str, int] = {}
        team_of: dict[str, Team] = {}
        for team in teams:
            absent: dict[str, str] = {}
            for answer in team.request({"prepare": nbytes}):
                absent.update(answer["absent"])
            missing.update({f"{name}, {place}": why for name, why in absent.items()})
            team_of.update({name: team for name in team.names if name not in absent})
        names = sorted(
            team_of, key=lambda name: FOREMOST.index(name) if name in FOREMOST else len(FOREMOST)
        )
        self._team_of = {name: team_of[name] for name in names}

    def warm_up(self) -> None:
        """Touch the memory, and compute the number of calls of a turn."""
        for name in self._team_of:
            seconds = median(self.measure(name, 3)[0])
            self._calls[name] = max(1, min(self._max_calls, round(_SECONDS_PER_TURN / seconds)))

    def take(self) -> None:
        """Give each contender one turn."""
        for name in self._team_of:
            by_rank = self.measure(name, self._calls[name])
            self._seconds.setdefault(name, []).append(max(median(calls) for calls in by_rank))
            self._means.setdefault(name, []).append(max(fmean(calls) for calls in by_rank))

    def measure(self, name: str, calls: int) -> list[list[float]]:
        """Return the seconds of each call, for each rank."""
        answers = self._team_of[name].request(
            {"measure": name, "calls": calls, "caches": self._caches}
        )
        return [answer["seconds"] for answer in answers]

    def rows(self, num_ranks: int) -> list[CommRow]:
        """Return a row for each contender."""
        return [
            CommRow(
                num_ranks,
                self._nbytes,
                Row(name, tuple(seconds)),
                fmean(self._means[name]),
                self._caches,
            )
            for name, seconds in self._seconds.items()
        ]


@contextlib.contextmanager
def _teams(num_ranks: int, missing: dict[str, str]) -> Iterator[list[Team]]:
    """Start ranks under `allstep run` and, if Open MPI works here, under mpirun.

    They end with the context. Contenders that cannot be measured are added to `missing` with the
    reason.
    """
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="allstep-bench-")))
        rank = run_module("allstep.bench.comm.rank")
        allstep_run = run_module("allstep", "run", "-np", str(num_ranks), *rank, "torch")
        teams = [start_team("allstep run", allstep_run, num_ranks, folder, ending)]
        if reason := _no_mpi():
            missing[OPEN_MPI] = reason
        else:
            mpirun = (*launch.mpirun_command()[:-1], str(num_ranks), *rank, "mpi")
            try:
                teams.append(start_team("mpirun", mpirun, num_ranks, folder, ending))
            except CommFailed as error:
                reason = str(error).splitlines()[-1]
                missing[f"{OPEN_MPI}, {num_ranks} ranks"] = f"it fails here: {reason}"
        yield teams


def _no_mpi() -> str:
    """Return why Open MPI cannot be measured, or "" if it can."""
    if not shutil.which("mpirun"):
        return "mpirun is not installed"
    if "Open MPI" not in launch.output_of("mpirun", "--version"):
        return "mpirun is another MPI's"
    return "" if find_spec("mpi4py") else "mpi4py is not installed"


def start_team(
    name: str,
    command: Sequence[str],
    num_ranks: int,
    folder: Path,
    ending: contextlib.ExitStack,
    seconds_to_answer: float = _SECONDS_TO_ANSWER,
    seconds_to_start: float = _SECONDS_TO_START,
) -> Team:
    """Start ranks and wait until all of them have connected.

    The path of the socket is appended to the command. `seconds_to_answer`: timeout of a request.
    `seconds_to_start`: timeout of the connections.
    """
    listener = ending.enter_context(socket.socket(socket.AF_UNIX))
    path = folder / f"{name}.socket"
    listener.bind(str(path))
    listener.listen(num_ranks)
    listener.settimeout(0.2)
    output = folder / f"{name}.txt"
    env = {**launch.environment_of(launch.LaunchContender(name, ())), "OMP_NUM_THREADS": "1"}
    with output.open("w") as sink:
        process = subprocess.Popen(
            [*command, str(path)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    ending.callback(_end, process)
    team = Team(name, process, output, seconds_to_answer=seconds_to_answer)
    _gather(team, listener, num_ranks, ending, seconds_to_start)
    return team


def _gather(
    team: Team,
    listener: socket.socket,
    num_ranks: int,
    ending: contextlib.ExitStack,
    seconds: float,
) -> None:
    """Accept a connection from every rank and store them in the order of ranks.

    `ending` closes the connections; the ranks then exit.
    """
    lines: dict[int, IO[str]] = {}
    started = time.monotonic()
    while len(lines) < num_ranks:
        try:
            link, _ = listener.accept()
        except TimeoutError:
            if team.process.poll() is not None:
                raise CommFailed(
                    f"{team.name} ended before its ranks were ready:\n{team.printed()}"
                ) from None
            if time.monotonic() - started > seconds:
                raise CommFailed(
                    f"{len(lines)} of {num_ranks} ranks of {team.name} were ready after"
                    f" {seconds:.0f} s:\n{team.printed()}"
                ) from None
            continue
        link.settimeout(team.seconds_to_answer)
        line = link.makefile("rw")
        # The file keeps the connection open.
        link.close()
        ending.callback(_hang_up, line)
        hello = json.loads(line.readline())
        lines[hello["rank"]] = line
        team.names = hello["names"]
    team.lines = [line for _, line in sorted(lines.items())]


def _hang_up(line: IO[str]) -> None:
    """Close the connection to a rank."""
    with contextlib.suppress(OSError):
        line.close()


def _end(process: subprocess.Popen[str]) -> None:
    """Wait until the ranks exit after their connections are closed, then end the others."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    launch.end(process)
