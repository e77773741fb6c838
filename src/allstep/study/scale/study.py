"""The scaling study: each number of workers runs once in each round, alone on the machine.

round    every number of workers once, in alternating order; ratios are taken within a round
trial    one number of workers in one round, such as "w4.round0", in a world of its own

Without `full` a trial ends as soon as it has been measured for some seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from allstep.costs.speed import Speed
from allstep.errors import ConfigError, cut
from allstep.launch import parse_hosts
from allstep.process.python import run_module
from allstep.runlog import RunRecord, kept, number
from allstep.study.one_precision import precision_override
from allstep.study.study import Study
from allstep.study.train_trial import training
from allstep.study.trial import FOLDER, Results, Trial

SET = {
    "batch_per_worker": "give --batch-per-worker",
    "sync": "workers that do not wait for each other have no common step; see `study sync`",
    "sync.name": "workers that do not wait for each other have no common step; see `study sync`",
}
"""Config keys that the study itself sets, and what to give instead."""

MEASURED = "measured"
"""Reason for the end of a trial that was measured long enough."""
_LEAST_LINES = 4
"""Lines of a run record that a trial needs: the first does not count."""


@dataclass(frozen=True)
class ScaleRounds:
    """The arguments of a scaling study."""

    recipe: str
    overrides: tuple[str, ...]
    """Overrides (key=value) of every run."""
    workers: tuple[int, ...]
    """Numbers of workers in rising order."""
    rounds: int
    batch: int
    """Samples of a step over all workers; with `per_worker`, of one worker."""
    cores: int
    """Cores of this machine: a trial has all of them."""
    per_worker: bool = False
    """Whether each worker has `batch` samples (weak scaling)."""
    hosts: str | None = None
    """Hosts and their slots, as for `allstep run -H`; None: this machine."""
    ssh: str = "ssh"
    link: Speed | None = None
    """Between hosts, as the user names it."""
    full: bool = False
    """Whether every trial trains to its end."""
    seconds: float = 10.0
    """Seconds of steps that are measured in each trial, without `full`."""
    precision: str | None = None
    """Precision of every run; None if the recipe sets it."""

    def batch_of(self, workers: int) -> int:
        """Return the samples of a step of this many workers."""
        return self.batch * workers if self.per_worker else self.batch

    @property
    def slots(self) -> tuple[int, ...]:
        """Workers of each host; empty without hosts."""
        return tuple(host.slots for host in parse_hosts(self.hosts)) if self.hosts else ()

    @property
    def per_host(self) -> int:
        """Largest number of workers of a host."""
        return max(self.slots, default=max(self.workers))

    def num_hosts(self, workers: int) -> int:
        """Return how many hosts have a worker: they are filled one after the other."""
        found, left = 0, workers
        for slots in self.slots or (workers,):
            if left > 0:
                found, left = found + 1, left - slots
        return found

    def check(self) -> None:
        """Raise ConfigError for numbers of workers that cannot be."""
        most = self.workers[-1]
        if self.slots and sum(self.slots) < most:
            raise ConfigError(
                f"--workers {most}: the hosts have {sum(self.slots)} slots; name more hosts or"
                " slots with -H, or fewer workers"
            )
        if self.batch_of(most) < most:
            raise ConfigError(
                f"--workers {most}: a step has {self.batch_of(most)} samples, fewer than workers;"
                " give fewer workers, or a larger batch"
            )

    def name(self, workers: int, round_: int) -> str:
        """Return the name of a trial."""
        return f"w{workers}.round{round_}"

    def trial(self, workers: int, round_: int) -> Trial:
        """Return the trial of a number of workers in a round."""
        share = f"batch_per_worker={self.batch}" if self.per_worker else f"batch={self.batch}"
        overrides = (*self.overrides, *precision_override(self.precision), share)
        facts = {"workers": workers, "round": round_}
        found = training(
            self.name(workers, round_), self.recipe, overrides, facts, num_workers=workers
        )
        found = replace(found, cores=self.cores)
        if not self.full:
            # A part of a run is no measurement: an interrupted trial starts again.
            found = replace(found, resume=(), epochs=None, seconds=self.seconds)
        if self.hosts is None:
            return found
        run = run_module("allstep", "run", "-np", str(workers), "-H", self.hosts, "--ssh", self.ssh)
        train = run_module("allstep", "train", self.recipe, "--out", FOLDER, *overrides)
        return replace(found, command=(*run, *train), settings=f"{found.settings} {self.hosts}")

    def trials(self) -> list[Trial]:
        """Return all trials, round by round; every second round begins with the most workers."""
        return [
            self.trial(workers, round_)
            for round_ in range(self.rounds)
            for workers in (self.workers if round_ % 2 == 0 else self.workers[::-1])
        ]

    def stop(self, trial: Trial, record: RunRecord, results: Results) -> str | None:
        """Return the reason to end a trial that has been measured long enough; None before."""
        lines = kept(record.steps)
        spent = sum(number(line, "seconds") or 0.0 for line in lines[1:])
        is_enough = len(lines) >= _LEAST_LINES and spent >= self.seconds
        return MEASURED if is_enough else None

    def study(self) -> Study:
        """Return the study for the runner; numbers of workers and rounds may be added later."""
        trials = self.trials()
        arguments: dict[str, Any] = {
            "study": "scale",
            "recipe": self.recipe,
            "words": list(self.overrides),
            "workers": list(self.workers),
            "rounds": self.rounds,
            "batch": self.batch,
            "per_worker": self.per_worker,
            "hosts": self.hosts,
            "full": self.full,
            "seconds": self.seconds,
        }
        return Study(
            arguments,
            lambda _: trials,
            len(trials),
            stop=None if self.full else self.stop,
            growing=frozenset({"workers", "rounds"}),
            precision=self.precision,
        )


def parse_workers(text: str) -> tuple[int, ...]:
    """Return numbers of workers such as "1,2,4"; raise ConfigError unless they rise."""
    parts = [part.strip() for part in text.split(",")]
    good = all(part.isdecimal() and len(part) < 6 and int(part) > 0 for part in parts)
    numbers: Sequence[int] = [int(part) for part in parts] if good else []
    if not numbers or sorted(set(numbers)) != numbers:
        raise ConfigError(
            f"--workers {cut(text)!r}: expected a rising list of numbers of 1 or more, such as"
            " 1,2,4"
        )
    return tuple(numbers)
