"""The runner's handle of a trial's process; `allstep.process.supervisor` is its other end."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from allstep.process.liveness import Life
from allstep.process.python import run_bare

_ONE_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Child:
    """A process that runs `command` with one thread and appends its output to the file `output`.

    The process ends when the runner's process ends. It holds the file `lock` while it lives.
    """

    def __init__(
        self, command: Sequence[str], output: Path, lock: Path, env: Mapping[str, str]
    ) -> None:
        self.began_at = time.time()
        """Start time in seconds since the epoch, as in run records."""
        self._began = time.monotonic()
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                run_bare("allstep.process.supervisor", str(lock), *command),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the terminal must reach only the runner, which then closes the pipe.
                start_new_session=True,
                env={**env, **_ONE_CORE},
            )
        self._life = Life(self._process.pid)

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the command has ended."""
        return self._life.fileno()

    @property
    def seconds(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._began

    def exit_code(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.poll()

    def let_go(self) -> None:
        """Close the supervisor's pipe: it kills the command and every process that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> int:
        """Release the leash, wait until the process has ended, and return its exit status."""
        self.let_go()
        return self._process.wait()
