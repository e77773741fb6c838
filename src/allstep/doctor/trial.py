"""A small real run: ranks are started by `allstep run` as for any other run, meet, and sum a
tensor."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.doctor.finding import Finding, problem
from allstep.doctor.trial_rank import MARK, take_part
from allstep.launch import Host
from allstep.limits import read_limits
from allstep.process.python import run_module
from allstep.wire.timeouts import bounded
from allstep.world import LAUNCHERS

_EXTRA_SECONDS = 15.0


@dataclass(frozen=True)
class Trial:
    """How it went.

    `phases`: seconds that rank 0 spent in import, init and allreduce. `error` None: it went well.
    """

    ranks: int
    seconds: float
    phases: dict[str, float]
    error: str | None = None

    def findings(self) -> list[Finding]:
        if self.error is None:
            return []
        first, *rest = [line.strip() for line in self.error.splitlines() if line.strip()]
        last = f" ... {rest[-1]}" if rest else ""
        return [
            problem(
                f"a trial of {self.ranks} ranks failed: {first}{last}",
                "mend the problems above; else see the trial's own words",
            )
        ]


def try_run(hosts: Sequence[Host] = (), ssh: str = "ssh", iface: str | None = None) -> Trial:
    """Two ranks here; or one rank on each of `hosts`, two where there is one host with room for
    them."""
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
    said = [line.partition(MARK)[2] for line in out.splitlines() if MARK in line]
    if code == 0 and said:
        return Trial(ranks, seconds, json.loads(said[-1]))
    return Trial(
        ranks,
        seconds,
        {},
        last_words(err)
        if code is not None
        else f"it did not end within {seconds:.0f} s\n{last_words(err)}",
    )


def join(size: int, launcher: str | None) -> Trial:
    """Inside a world: do with its other ranks, which do the same, what any script would."""
    began = time.monotonic()
    try:
        _, phases = take_part(launcher)
    except Exception as error:  # whatever a rank may meet is what we came to hear
        return Trial(size, time.monotonic() - began, {}, f"{type(error).__name__}: {error}")
    return Trial(size, time.monotonic() - began, phases)


def _run(command: list[str]) -> tuple[int | None, str, str]:
    """Exit code (None: out of time), standard output and error.

    The launcher cleans up behind itself, even when killed.
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
        out, err = process.communicate(timeout=_patience())
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        out, err = process.communicate()
        return None, out, err


def _patience() -> float:
    """Ranks have the start timeout to join, an hour at most; importing torch comes on top."""
    with contextlib.suppress(ValueError, RuntimeError):
        return bounded(read_limits().start) + _EXTRA_SECONDS
    return 30.0 + _EXTRA_SECONDS


def _outside() -> dict[str, str]:
    """Our environment as if no launcher had started us; what is wrong with the launcher's variables
    is a finding of its own."""
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


def last_words(err: str) -> str:
    """What the launcher printed last and alone, or else the last lines."""
    lines = err.strip().splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("allstep")]
    kept = lines[starts[-1] :] if starts else lines[-5:]
    return "\n".join(kept) or "it said nothing"
