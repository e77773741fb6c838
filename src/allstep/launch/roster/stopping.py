"""The end of an elastic run, from the decision to end it until all workers have ended.

Workers get a signal, or a request to save. After the grace time they are killed; 10 s later the run
ends without waiting for those whose ends were not reported. A forwarded signal has the rules of
`run_state`: once each, 3 s of grace after Ctrl-C, and a second Ctrl-C kills.
"""

import signal

from allstep.launch.run_events import Conclusion
from allstep.launch.run_state import RESUBMIT

# Between SIGTERM and SIGKILL after a failure, or after Ctrl-C.
STOP_SECONDS = 3.0
# Wait after SIGKILL for the agents to report the ends of their workers.
_GIVE_UP_SECONDS = 10.0


class Stopping:
    """A run that ends. conclusion: known from the start, or None if the exits decide its code."""

    def __init__(self, kill_at: float, conclusion: Conclusion | None, text: str = "") -> None:
        self.kill_at = kill_at
        self.signals: list[int] = []
        self.codes: list[int] = []
        self.give_up_at = float("inf")
        # A worker that saves the state was chosen, or has done so by itself.
        self.has_writer = False
        self._conclusion = conclusion
        self._text = text

    @property
    def lets_save(self) -> bool:
        """Return whether the run ends with its state saved, not with a failure."""
        return self._conclusion is None

    def add_exit(self, code: int) -> None:
        """Record the exit code of a worker."""
        self.codes.append(code)
        self.has_writer |= code == RESUBMIT

    @property
    def is_killing(self) -> bool:
        """Return whether SIGKILL was sent."""
        return self.give_up_at < float("inf")

    def forward(self, number: int, at: float, grace: float) -> bool:
        """Record a signal; return whether to forward it."""
        if number in self.signals:
            if number == signal.SIGINT:
                self.kill_at = min(self.kill_at, at)
            return False
        self.signals.append(number)
        limit = min(grace, STOP_SECONDS) if number == signal.SIGINT else grace
        self.kill_at = min(self.kill_at, at + limit)
        return True

    def kill(self, at: float) -> None:
        """Record that SIGKILL was sent."""
        self.give_up_at = at + _GIVE_UP_SECONDS

    def conclusion(self, num_left: int) -> Conclusion:
        """Return the end of the run. num_left: workers whose end was not reported."""
        return self._conclusion or Conclusion(self._code(num_left), self._text)

    def _code(self, num_left: int) -> int:
        if RESUBMIT in self.codes:
            return RESUBMIT
        if not self.signals:
            return 1
        all_succeeded = self.codes and not any(self.codes) and not num_left
        return 0 if all_succeeded else 128 + self.signals[0]
