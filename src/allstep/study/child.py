"""A trial's process, seen from the runner. The other end is `allstep.process.supervisor`."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from allstep.process.liveness import Life
from allstep.process.python import run_bare

_ONE_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Child:
    """A command that runs on one core and writes to `output`, after what is there already.

    It ends when we end.
    """

    def __init__(
        self, command: Sequence[str], output: Path, lock: Path, env: Mapping[str, str]
    ) -> None:
        self.began_at = time.time()
        """The time, as records have it."""
        self._began = time.monotonic()
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                run_bare("allstep.process.supervisor", str(lock), *command),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the terminal is for the runner, which then closes the supervisor's pipe
                start_new_session=True,
                env={**env, **_ONE_CORE},
            )
        self._life = Life(self._process.pid)

    def fileno(self) -> int:
        """Is readable when the command has ended."""
        return self._life.fileno()

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._began

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def let_go(self) -> None:
        """The supervisor kills the command and all that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> int:
        """Waits until nothing of it is left; how it ended."""
        self.let_go()
        return self._process.wait()
