"""A small real run: `allstep run` starts ranks that join a world and sum a tensor."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.doctor.finding import Finding, problem
from allstep.doctor.trial_rank import MARK, run_rank
from allstep.launch import Host
from allstep.limits import read_limits
from allstep.process.python import run_module
from allstep.wire.timeouts import bounded
from allstep.world import LAUNCHERS

_EXTRA_SECONDS = 15.0


@dataclass(frozen=True)
class Trial:
    """Result of a trial run."""

    ranks: int
    """Number of ranks."""
    seconds: float
    """Duration of the trial."""
    phases: dict[str, float]
    """Seconds that rank 0 spent in import, init and allreduce."""
    error: str | None = None
    """Error of the trial; None if it succeeded."""

    def findings(self) -> list[Finding]:
        """Return a problem if the trial failed."""
        if self.error is None:
            return []
        first, *rest = [line.strip() for line in self.error.splitlines() if line.strip()]
        last = f" ... {rest[-1]}" if rest else ""
        return [
            problem(
                f"a trial of {self.ranks} ranks failed: {first}{last}",
                "fix the problems above; if there are none, see the output of the trial",
            )
        ]


def try_run(hosts: Sequence[Host] = (), ssh: str = "ssh", iface: str | None = None) -> Trial:
    """Run a trial of two ranks on this machine, or of one rank on each of `hosts`.

    A single host with two slots or more gets two ranks. `ssh` and `iface` are those of `allstep
    run`.
    """
    used = (
        [host._replace(slots=1) for host in hosts]
        if len(hosts) > 1
        else [host._replace(slots=min(2, host.slots)) for host in hosts]
    )
    ranks = sum(host.slots for host in used) or 2
    where = (
        ["-H", ",".join(f"{host.name}:{host.slots}" for host in used), "--ssh", ssh] if used else []
    )
    where += ["--iface", iface] if used and iface else []
    command = run_module("allstep", "run", "-np", str(ranks), *where, "--grace", "2", "--")
    began = time.monotonic()
    code, out, err = _run([*command, *run_module("allstep.doctor.trial_rank")])
    seconds = time.monotonic() - began
    marked = [line.partition(MARK)[2] for line in out.splitlines() if MARK in line]
    if code == 0 and marked:
        return Trial(ranks, seconds, json.loads(marked[-1]))
    late = f"it did not end within {seconds:.0f} s\n" if code is None else ""
    return Trial(ranks, seconds, {}, late + last_message(err))


def join(size: int, launcher: str | None) -> Trial:
    """Run the trial as one rank of the world of this process; the other ranks call it too."""
    began = time.monotonic()
    try:
        _, phases = run_rank(launcher)
    # Any error that a rank can raise is a result of the trial.
    except Exception as error:
        return Trial(size, time.monotonic() - began, {}, f"{type(error).__name__}: {error}")
    return Trial(size, time.monotonic() - began, phases)


def _run(command: list[str]) -> tuple[int | None, str, str]:
    """Run the command and return exit code (None: timeout), standard output and standard error.

    The launcher ends its workers itself, even when it is killed.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_outside(),
    )
    try:
        out, err = process.communicate(timeout=_timeout())
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        out, err = process.communicate()
        return None, out, err


def _timeout() -> float:
    """Return the timeout: the start timeout, at most an hour, plus time to import torch."""
    with contextlib.suppress(ValueError, RuntimeError):
        return bounded(read_limits().start) + _EXTRA_SECONDS
    return 30.0 + _EXTRA_SECONDS


def _outside() -> dict[str, str]:
    """Return our environment without the variables of launchers.

    Errors in those variables are findings of their own.
    """
    names = {"ALLSTEP_LAUNCHER", "PMIX_RANK"}
    for launcher in LAUNCHERS.values():
        names.update(
            launcher.rank,
            launcher.size,
            launcher.local_rank,
            launcher.local_size,
            launcher.node,
            launcher.needs,
        )
    return {name: value for name, value in os.environ.items() if name not in names}


def last_message(err: str) -> str:
    """Return the launcher's last message on standard error, or else the last five lines."""
    lines = err.strip().splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("allstep")]
    kept = lines[starts[-1] :] if starts else lines[-5:]
    return "\n".join(kept) or "no output"
