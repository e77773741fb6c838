"""The study of updates to a goal, by batch, with the best of a few learning rates each.

Every batch has a chain of trials, one learning rate after the other (`lr_steps`); chains run in
parallel. A run ends as soon as its validation accuracy reaches the goal, and is stopped after twice
as many updates as the best of its batch needed. The learning rate is constant, without warm-up, so
that a run does not depend on its maximum length.
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
"""A trial is stopped after this many times the fewest updates so far."""


_CONSTANT = "its learning rates are constant"
SET = {
    **dict.fromkeys(("batch", "batch_per_worker"), "give --batches"),
    "evaluation.every": "give --every",
    "evaluation.stop_at": "give --goal",
    "optimizer.scaling": "it searches the learning rate of each batch",
    **dict.fromkeys(("schedule.shape", "schedule.warmup", "schedule.warmup_kind"), _CONSTANT),
}
"""Config keys that the study itself sets, and what to give instead, or why."""


@dataclass(frozen=True)
class UpdatesSearch:
    """The arguments of a study of updates."""

    recipe: str
    overrides: tuple[str, ...]
    """Overrides (key=value) of every run."""
    lr: float
    """The recipe's learning rate.

    The first learning rate of a batch is scaled from it by the square root of the batch.
    """
    base_batch: int
    """The batch for which `lr` was found."""
    batches: tuple[int, ...]
    num_rates: int
    """Maximum number of learning rates for each batch."""
    goal: float
    """Validation accuracy at which a run ends."""
    epochs: int
    """Maximum epochs of a run that does not reach the goal."""
    every: float
    """Epochs between two evaluations, which is the resolution of the counted updates."""
    seed: int = 0
    data: str = ""
    """Name of the dataset, for the comparison with published results."""
    precision: str | None = None
    """Precision of every run; None if the recipe sets it."""

    def trial(self, batch: int, k: int) -> Trial:
        """Return the trial with the learning rate `k` steps above the first (k < 0: below)."""
        lr = rate(self.lr * math.sqrt(batch / self.base_batch), k)
        overrides = (
            *precision_override(self.precision),
            *(f"epochs={self.epochs}", f"batch={batch}", f"seed={self.seed}"),
            *(f"optimizer.lr={lr:g}", "optimizer.scaling=none", "schedule.shape=constant"),
            *("schedule.warmup=0", "schedule.warmup_kind=none"),
            *(f"evaluation.every={self.every:g}", f"evaluation.stop_at={self.goal:g}"),
        )
        facts = {"batch": batch, "k": k, "lr": lr}
        return training(f"{batch}-lr{lr:g}", self.recipe, (*self.overrides, *overrides), facts)

    def chain(
        self, batch: int, results: Results
    ) -> tuple[list[tuple[Trial, RunFigures]], Trial | None]:
        """Return the finished trials of a batch, in order, and the next one to try."""
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
        """Return all finished trials, then the next one of each chain, the shortest chain first."""
        chains = [self.chain(batch, results) for batch in self.batches]
        following = sorted(
            (len(ended), i) for i, (ended, trial) in enumerate(chains) if trial is not None
        )
        over = [trial for ended, _ in chains for trial, _ in ended]
        return over + [trial for _, i in following if (trial := chains[i][1]) is not None]

    def stop(self, trial: Trial, record: RunRecord, results: Results) -> str | None:
        """Return a reason to stop after twice the fewest updates of the batch, else None."""
        batch = trial.facts["batch"]
        best = fewest(self.chain(batch, results)[0])
        seen = int(number(record.steps[-1], "samples") or 0) if record.steps else 0
        if best is None or num_updates(record, seen, batch) <= TOO_LONG * best[1]:
            return None
        return f"more than {TOO_LONG:g} times the {best[1]} updates that lr {best[0]:g} needs"

    def study(self) -> Study:
        """Return the study for the runner; batches and rates may be added later."""
        arguments: dict[str, Any] = {
            "study": "updates",
            "recipe": self.recipe,
            "words": list(self.overrides),
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
    """Return the learning rate with the fewest updates to the goal, and their number, or None."""
    reached = [(run.reached.updates, trial.facts["lr"]) for trial, run in ended if run.reached]
    return (min(reached)[1], min(reached)[0]) if reached else None


def _scores(ended: Sequence[tuple[Trial, RunFigures]]) -> dict[int, float]:
    return {
        trial.facts["k"]: run.reached.updates if run.reached else math.inf for trial, run in ended
    }


def _too_high(ended: Sequence[tuple[Trial, RunFigures]]) -> int | None:
    return min((trial.facts["k"] for trial, run in ended if run.diverged), default=None)
