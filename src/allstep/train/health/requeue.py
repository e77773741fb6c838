"""`--requeue`: ask Slurm to start this job again once its state is saved.

```
signal, --max-time -> checkpoint complete -> scontrol requeue JOB -> exit with 75
                                             Slurm ends the job and starts it again: --resume auto
```

Slurm counts the starts in SLURM_RESTART_COUNT. Where `scontrol` is missing, as in many containers,
or refuses, the reason is printed and the exit status 75 is what remains: `RequeueExit=75` in
slurm.conf lets Slurm requeue such a job by itself.

One worker calls it: rank 0 of a fixed world; in an elastic run the worker that has saved the state,
which may have had another rank when the run started.
"""

import shutil
import subprocess
from collections.abc import Mapping

from allstep.console.escape import print_notice
from allstep.wire.keys import JOINS, TICKET, WORKER

MAX_REQUEUES = 100
"""Default of --max-requeues."""
_SECONDS = 60.0


class JobRequeue:
    """`--requeue` in one process: at most one call of `scontrol`.

    env: environment of the process. rank: its rank at the start. max_requeues: see `why_not`; None
    without --requeue, so that nothing is called.
    """

    def __init__(self, env: Mapping[str, str], rank: int, max_requeues: int | None) -> None:
        self._env, self._most = env, max_requeues
        self.is_mine = _is_first(env, rank)
        """Whether this process makes the call if the run stops now."""
        if self.is_mine and max_requeues is not None and (reason := why_not(env, max_requeues)):
            print_notice(f"--requeue: this run will not be requeued when it is stopped: {reason}")

    def __call__(self) -> None:
        """Requeue the job, if that is the task of this process and has not been done."""
        is_mine, self.is_mine = self.is_mine, False
        if is_mine and self._most is not None:
            print_notice(requeue(self._env, self._most))


def _is_first(env: Mapping[str, str], rank: int) -> bool:
    """Return whether this process represents the run until a state is saved.

    Workers of an elastic run have no rank yet; their variables give one that may occur twice.
    """
    if TICKET in env:
        return env.get(WORKER) == "0" and JOINS not in env
    return rank == 0


def why_not(env: Mapping[str, str], max_requeues: int) -> str | None:
    """Return the reason why this job cannot be requeued, or None. max_requeues: of the job."""
    if not env.get("SLURM_JOB_ID"):
        return "this is not a Slurm job (SLURM_JOB_ID is not set)"
    if shutil.which("scontrol", path=env.get("PATH")) is None:
        return "there is no program scontrol in PATH"
    count = env.get("SLURM_RESTART_COUNT", "0")
    if count.isdigit() and int(count) >= max_requeues:
        return f"it was requeued {count} times, --max-requeues is {max_requeues}"
    return None


def requeue(env: Mapping[str, str], max_requeues: int) -> str:
    """Requeue the Slurm job of this process, if possible; return one line about it."""
    reason = why_not(env, max_requeues)
    if reason is None:
        reason = _call(["scontrol", "requeue", env["SLURM_JOB_ID"]], env)
    if reason is None:
        return f"requeued Slurm job {env['SLURM_JOB_ID']}"
    return f"not requeued: {reason}; the state is saved: submit the job again to continue"


def _call(command: list[str], env: Mapping[str, str]) -> str | None:
    """Run a command; return why it failed, or None."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            env=dict(env),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{' '.join(command)}` failed: {error}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"`{' '.join(command)}` failed: {lines[-1]}"
    return None
