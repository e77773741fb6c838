"""The lines about lost workers of a run that continues without them (`roster.continuing`).

The launcher prints such a line at once. Under `allstep train`, rank 0 of the next world prints one
that also has the position and the time without a step. The launcher then prints its own only if no
world follows: at the end of the run.
"""

from collections.abc import Callable


class LossLines:
    """The lines that are not printed yet. notify: prints a line."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._kept: list[str] = []

    def add(self, text: str, *, worker_prints: bool) -> None:
        """Print a line, or keep it because a worker of the next world prints one."""
        self._kept.append(f"allstep run: {text}")
        if not worker_prints:
            self.print_kept()

    def drop_kept(self) -> None:
        """Forget the lines that are kept: the next world was formed."""
        self._kept.clear()

    def print_kept(self) -> None:
        """Print the lines that no worker has printed."""
        kept, self._kept = self._kept, []
        for line in kept:
            self._notify(line)
