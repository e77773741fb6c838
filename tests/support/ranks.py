"""The fixture `ranks`: run a function on n ranks, with a time limit, and leave nothing behind.

    def test_sum(ranks):
        assert ranks(2, add_up) == [3, 3]          # results by rank; a rank that fails shows the output of all

    outcomes = ranks.outcomes(2, die_on_rank_1)    # for tests of failures: exit code, output and result of each

In the function `allstep.init()` works: the ranks see the world that `allstep run` would give them,
with a store that lives in the test process. `hosts=["a", "a", "b"]` says on which (imagined) host
each rank is.
"""

import contextlib
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from allstep import wire
from allstep.world import LAUNCHERS, places


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    `exit_code` is negative for a signal, as in subprocess; `result` is None when there is none.
    """

    rank: int
    exit_code: int
    output: str
    result: Any


class Ranks:
    """Starts ranks in a fork server; see the module."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        server = Path(__file__).parent / "rank_server.py"
        self.process = subprocess.Popen(
            [sys.executable, str(server), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.link = multiprocessing.connection.Connection(ours.detach())
        self.folder = Path()
        self.calls = 0
        assert self.link.recv() == "ready"

    def __call__(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        """Results by rank. Fails the test, showing all output, when a rank fails."""
        outcomes = self.outcomes(num_ranks, function, *args, **options)
        if any(outcome.exit_code for outcome in outcomes):
            pytest.fail("\n".join(describe(outcome) for outcome in outcomes), pytrace=False)
        return [outcome.result for outcome in outcomes]

    def outcomes(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 90,
        hosts: Sequence[str] | None = None,
        env: dict[str, str] | None = None,
        envs: Sequence[dict[str, str]] | None = None,
        alongside: Callable[[wire.Server], None] | None = None,
    ) -> list[Outcome]:
        """How each rank ended, whatever it did.

        A rank that is not done after `timeout` seconds fails the test. `envs`: variables of each
        rank. `alongside`: called with the store once the ranks run, in this process.
        """
        self.calls += 1
        folder = self.folder / f"ranks-{self.calls}"
        folder.mkdir(parents=True)
        token = wire.new_token()
        with wire.Server(token) as store:
            common = {
                **clean_environment(),
                "ALLSTEP_STORE": f"127.0.0.1:{store.port}",
                "ALLSTEP_TOKEN": token,
                **(env or {}),
            }
            worlds = places(hosts or ["testhost"] * num_ranks)
            request = {
                "env": [
                    {**common, **world.to_env(), **(envs[world.rank] if envs else {})}
                    for world in worlds
                ],
                "folder": str(folder),
                "path": sys.path,
                "call": cloudpickle.dumps((function, args)),
            }
            self.link.send(request)
            pids = self.link.recv()
            problem = _problem_of(alongside, store)
            late = problem is not None or not self.link.poll(timeout)
            for pid in pids:
                kill_group(pid)
            codes = self.link.recv()
        outcomes = [outcome_in(folder, rank, code) for rank, code in enumerate(codes)]
        if late:
            reason = problem or f"not done after {timeout} s"
            pytest.fail(f"{reason}:\n" + "\n".join(map(describe, outcomes)), pytrace=False)
        return outcomes

    def close(self) -> None:
        self.link.close()
        self.process.wait(timeout=60)


def clean_environment() -> dict[str, str]:
    """Our environment without what another launcher may have left in it."""
    foreign = {name for known in LAUNCHERS.values() for names in known[1:] for name in names}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in foreign and not name.startswith("ALLSTEP_")
    }


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port for ranks that must be told one.

    Until they take it the kernel gives it to nobody else (as launch/agent does it).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0", 0))
        yield holder.getsockname()[1]


def kill_group(pid: int) -> None:
    """End what is left of a rank and of the processes it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def shared_memory_files() -> list[str]:
    """What our segments have left in /dev/shm.

    Those of a test beside us are there for moments only: ask until there is nothing.
    """
    return [name for name in os.listdir("/dev/shm") if "allstep" in name]


def outcome_in(folder: Path, rank: int, code: int) -> Outcome:
    out, result = folder / f"{rank}.out", folder / f"{rank}.result"
    return Outcome(
        rank,
        code,
        out.read_text(errors="replace") if out.exists() else "",
        pickle.loads(result.read_bytes()) if result.exists() else None,
    )


def _problem_of(alongside: Callable[[wire.Server], None] | None, store: wire.Server) -> str | None:
    """Call what runs alongside the ranks; return why it failed, or None."""
    try:
        if alongside is not None:
            alongside(store)
    except Exception as error:
        return f"alongside the ranks: {type(error).__name__}: {error}"
    return None


def describe(outcome: Outcome) -> str:
    return f"----- rank {outcome.rank}, exit code {outcome.exit_code}\n{outcome.output}"


@pytest.fixture(scope="session")
def rank_server(processes: None) -> Iterator[Ranks]:
    server = Ranks()
    yield server
    server.close()


@pytest.fixture
def ranks(rank_server: Ranks, tmp_path: Path) -> Ranks:
    rank_server.folder = tmp_path
    return rank_server


def wait_until(
    condition: Callable[[], Any], seconds: float = 30, what: str = "the condition"
) -> Any:
    """Poll until the condition holds; its value. Fails the test when it does not in time.

    Limits are for hangs, not for speed: the machine may stand still for seconds.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"{what} did not come true within {seconds} s")
