"""How many updates does a model need to a goal, by batch, with the best of a few rates each?

Every batch has a chain of trials, one rate after the other (`lr_steps`); chains run side by side. A
run ends as soon as its validation accuracy is at the goal, and is stopped when it has made twice as
many updates as the best of its batch. The rate is constant, without warm-up, so that a run does not
depend on how long it might have gone on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allstep.runlog import RunRecord, number
from allstep.study.one_precision import precision_override
from allstep.study.results import RunFigures, figures, num_updates
from allstep.study.study import Study
from allstep.study.train_trial import training
from allstep.study.trial import Results, Trial
from allstep.study.updates.lr_steps import next_step, rate

TOO_LONG = 2.0
"""Times the fewest updates so far: then a trial is stopped."""


_CONSTANT = "its rates are constant"
SET = {
    **dict.fromkeys(("batch", "batch_per_worker"), "give --batches"),
    "evaluation.every": "give --every",
    "evaluation.stop_at": "give --goal",
    "optimizer.scaling": "it looks for the rate of each batch",
    **dict.fromkeys(("schedule.shape", "schedule.warmup", "schedule.warmup_kind"), _CONSTANT),
}
"""Keys that the study itself sets, and what to give instead."""


@dataclass(frozen=True)
class UpdatesSearch:
    """What is asked."""

    recipe: str
    words: tuple[str, ...]
    """key=value, for every run."""
    lr: float
    base_batch: int
    """The recipe's rate and the batch that it was found with; the first rate of a batch is scaled
    from it by the square root."""
    batches: tuple[int, ...]
    num_rates: int
    """For each batch, at most."""
    goal: float
    epochs: int
    """After so many a run ends without having reached the goal."""
    every: float
    """Epochs between two evaluations: how finely updates are counted."""
    seed: int = 0
    data: str = ""
    """The name of the data, for what was published about it."""
    precision: str | None = None
    """Of every run, where the recipe leaves it to the machine."""

    def trial(self, batch: int, k: int) -> Trial:
        """The k-th rate up (or down) from the first."""
        lr = rate(self.lr * math.sqrt(batch / self.base_batch), k)
        words = (
            *precision_override(self.precision),
            *(f"epochs={self.epochs}", f"batch={batch}", f"seed={self.seed}"),
            *(f"optimizer.lr={lr:g}", "optimizer.scaling=none", "schedule.shape=constant"),
            *("schedule.warmup=0", "schedule.warmup_kind=none"),
            *(f"evaluation.every={self.every:g}", f"evaluation.stop_at={self.goal:g}"),
        )
        facts = {"batch": batch, "k": k, "lr": lr}
        return training(f"{batch}-lr{lr:g}", self.recipe, (*self.words, *words), facts)

    def chain(
        self, batch: int, results: Results
    ) -> tuple[list[tuple[Trial, RunFigures]], Trial | None]:
        """The trials of a batch that ended, in the order of trying, and the one to try next."""
        ended: list[tuple[Trial, RunFigures]] = []
        while True:
            k = next_step(_scores(ended), self.num_rates, _too_high(ended))
            if k is None:
                return ended, None
            trial = self.trial(batch, k)
            if trial.name not in results:
                return ended, trial
            ended.append((trial, figures(results[trial.name], batch, self.goal)))

    def wanted(self, results: Results) -> list[Trial]:
        """What ended, and the next of each chain; the chain that is furthest behind comes first."""
        chains = [self.chain(batch, results) for batch in self.batches]
        following = sorted(
            (len(ended), i) for i, (ended, trial) in enumerate(chains) if trial is not None
        )
        over = [trial for ended, _ in chains for trial, _ in ended]
        return over + [trial for _, i in following if (trial := chains[i][1]) is not None]

    def stop(self, trial: Trial, record: RunRecord, results: Results) -> str | None:
        """At twice the fewest updates of the batch so far."""
        batch = trial.facts["batch"]
        best = fewest(self.chain(batch, results)[0])
        seen = int(number(record.steps[-1], "samples") or 0) if record.steps else 0
        if best is None or num_updates(record, seen, batch) <= TOO_LONG * best[1]:
            return None
        return f"more than {TOO_LONG:g} times the {best[1]} updates that rate {best[0]:g} needs"

    def study(self) -> Study:
        """For the runner."""
        arguments: dict[str, Any] = {
            "study": "updates",
            "recipe": self.recipe,
            "words": list(self.words),
            "batches": list(self.batches),
            "rates": self.num_rates,
            "goal": self.goal,
            "epochs": self.epochs,
            "every": self.every,
            "seed": self.seed,
        }
        most = len(self.batches) * self.num_rates
        return Study(
            arguments,
            self.wanted,
            most,
            self.stop,
            growing=frozenset({"batches", "rates"}),
            precision=self.precision,
        )


def fewest(ended: Sequence[tuple[Trial, RunFigures]]) -> tuple[float, int] | None:
    """The rate that needs the fewest updates to the goal, and how many; None when no run got there."""
    reached = [(run.reached.updates, trial.facts["lr"]) for trial, run in ended if run.reached]
    return (min(reached)[1], min(reached)[0]) if reached else None


def _scores(ended: Sequence[tuple[Trial, RunFigures]]) -> dict[int, float]:
    return {
        trial.facts["k"]: run.reached.updates if run.reached else math.inf for trial, run in ended
    }


def _too_high(ended: Sequence[tuple[Trial, RunFigures]]) -> int | None:
    return min((trial.facts["k"] for trial, run in ended if run.diverged), default=None)
