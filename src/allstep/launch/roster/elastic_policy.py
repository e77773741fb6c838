"""The options of an elastic run, with their checks."""

import random
from dataclasses import dataclass

# Wait before the slot of a dead worker is used again: doubles with each failure, up to the longest.
_FIRST_DELAY = 1.0
_LONGEST_DELAY = 60.0
# A member gets this time and that of its last step to obey the end of its generation.
_GRACE = 2.0
_START_SECONDS = 600.0
MAX_FAILURES = 3
"""Failures of a slot without a finished step in between, after which it is given up, by default."""


@dataclass(frozen=True)
class Policy:
    """The options of an elastic run. All times are in seconds.

    num_workers: workers that form generation 0. min_workers: smallest number to continue with.
    max_workers: largest number, None for no limit. spares: further workers that are kept on
    standby; needs a maximum. max_failures: failures of a slot without a finished step in between
    after which it is given up. elastic_timeout: longest wait for workers, at the start and after
    the end of a generation; `start_timeout` applies to workers that have been started. reset_limit:
    how many plans may follow the first, None for no limit.

    Horovod's rules: blacklist: a failing worker excludes its whole host. cooldown_range: shortest
    and longest time after which such a host is used again, None for never. notify_after: announce
    started workers after this time although they are not on standby yet; the next plan then waits
    for them, `join_timeout` at most. None: announce workers when they are on standby.

    replaces: False for a run that continues without lost workers and starts no others; see
    `continuing`.

    first_step: grace time of a member that has not finished a step yet, in place of its last step.
    grace: time between a forwarded signal and SIGKILL. seed: of the random part of a cool-down.
    """

    num_workers: int
    min_workers: int
    max_workers: int | None = None
    spares: int = 0
    max_failures: int = MAX_FAILURES
    elastic_timeout: float = 600.0
    reset_limit: int | None = None
    blacklist: bool = False
    cooldown_range: tuple[float, float] | None = None
    notify_after: float | None = None
    join_timeout: float = 30.0
    replaces: bool = True
    first_step: float = 30.0
    grace: float = 30.0
    seed: int = 0

    @classmethod
    def continuing(cls, num_workers: int, grace: float = 30.0) -> "Policy":
        """Return the policy of a run that one living worker can continue.

        That is a run in which workers do not wait for each other at every step. Lost workers are
        not replaced, and the others need not leave their world at once (`roster.continuing`).
        """
        return cls(num_workers, 1, num_workers, replaces=False, grace=grace)

    def __post_init__(self) -> None:
        self._check_counts()
        if self.cooldown_range is not None:
            low, high = self.cooldown_range
            if not 1 <= low <= high <= 3600:
                raise ValueError(
                    f"cool-down range {low:g} {high:g}: expected 1 <= low <= high <= 3600 seconds"
                )

    def _check_counts(self) -> None:
        if self.min_workers < 1 or self.max_failures < 1:
            raise ValueError(
                f"at least {self.min_workers} workers, {self.max_failures} failures: each must be"
                " 1 or more"
            )
        if self.min_workers > self.num_workers:
            raise ValueError(
                f"a minimum of {self.min_workers} workers is above their number"
                f" {self.num_workers}: lower the minimum"
            )
        if self.max_workers is not None and self.max_workers < self.num_workers:
            raise ValueError(
                f"a maximum of {self.max_workers} workers is below their number"
                f" {self.num_workers}: raise the maximum"
            )
        if self.spares < 0 or (self.spares and self.max_workers is None):
            raise ValueError(
                f"{self.spares} spare workers: expected 0 or more, and a maximum of workers above"
                " which they wait"
            )
        if self.reset_limit is not None and self.reset_limit < 0:
            raise ValueError(f"a reset limit of {self.reset_limit}: expected 0 or more")

    @property
    def num_slots(self) -> int:
        """Return how many slots of one host the run can use: without a maximum those it starts."""
        return self.most_ranks + self.spares

    @property
    def most_ranks(self) -> int:
        """Return how many ranks a world can have: without a maximum those it starts with."""
        return self.max_workers or self.num_workers

    @property
    def start_timeout(self) -> float:
        """Return the longest wait for the first workers, if enough of them have been started.

        They import and read data first, which takes longer than a user wants to wait for hosts.
        """
        return max(self.elastic_timeout, _START_SECONDS)

    def room_for(self, num_workers: int) -> float:
        """Return how many workers may join `num_workers`: infinity without a maximum."""
        return float("inf") if self.max_workers is None else self.max_workers - num_workers

    def delay_after(self, failures: int) -> float:
        """Return the seconds for which a slot with so many failures in a row stays empty."""
        # A slot with 1000 failures would overflow a float.
        doublings = min(failures - 1, 10)
        return float(min(_FIRST_DELAY * 2**doublings, _LONGEST_DELAY))

    def cooldown_of(self, host: str, times: int) -> float:
        """Return the seconds for which a host is excluded the so many-th time, from 1."""
        if self.cooldown_range is None:
            return float("inf")
        low, high = self.cooldown_range
        jitter = random.Random(f"{self.seed} {host} {times}").random()
        return float(max(low, min(low * 2 ** min(times, 12) + jitter * low, high)))

    def grace_of(self, step_seconds: float | None) -> float:
        """Return the time that a member has to obey the end of its generation.

        step_seconds: the time of its last step, None if it has not finished one.
        """
        return _GRACE + (self.first_step if step_seconds is None else step_seconds)
