"""The goodput part of `allstep plan`: --goal with --study, --price, --deadline and --budget."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allstep.errors import ConfigError

if TYPE_CHECKING:
    from allstep.plan.answers.plan_table import Plan


@dataclass(frozen=True)
class GoalOptions:
    """The options about a goal."""

    goal: float | None = None
    study: Path | None = None
    price: float | None = None
    deadline: str | None = None
    budget: float | None = None
    most_per_worker: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the time to a goal is to be planned."""
        return self.goal is not None or self.study is not None

    def check(self) -> None:
        """Raise ConfigError for options that do not fit together."""
        others = {
            "--price": self.price,
            "--deadline": self.deadline,
            "--budget": self.budget,
            "--most-per-worker": self.most_per_worker,
        }
        given = [name for name, value in others.items() if value is not None]
        if given and not self.is_asked:
            raise ConfigError(f"{given[0]} is about the way to a goal: add --goal 0.9")
        for name in ("--price", "--budget"):
            value = others[name]
            if isinstance(value, float) and not (value > 0 and isfinite(value)):
                raise ConfigError(f"{name} {value}: expected a number above 0")
        _ = self.deadline_seconds

    @property
    def deadline_seconds(self) -> float | None:
        """The value of --deadline in seconds."""
        if self.deadline is None:
            return None
        from allstep.train.health.stop_request import parse_time

        try:
            return parse_time(self.deadline)
        except ConfigError:
            raise ConfigError(
                f"--deadline {self.deadline[:40]!r}: expected a time such as 90m, 2h or 1h30m"
            ) from None


@dataclass(frozen=True)
class GoalFigures:
    """The table as text and as JSON values."""

    text: str
    plain: dict[str, Any]


def goal_of(
    plan: "Plan", recipe: str, overrides: list[str], asked: GoalOptions
) -> GoalFigures | None:
    """Return the way to the goal for the numbers of workers of a plan; None if none is asked."""
    if not asked.is_asked:
        return None
    from allstep.plan.answers.goodput import best_way, recommend
    from allstep.plan.answers.goodput_table import as_plain, as_text
    from allstep.study.calibration.progress_to_goal import find_progress
    from allstep.train.config.read_config import read_config
    from allstep.train.step.learning_rate import peak_lr

    progress = find_progress(recipe, asked.study, asked.goal)
    if progress.is_ratio and (asked.deadline or asked.budget):
        raise ConfigError(
            f"--deadline and --budget need hours, which {progress.source} does not give; use a"
            " finished `allstep study updates`"
        )
    config = read_config(recipe, overrides)

    def lr(batch: int) -> float:
        changed = config.model_copy(update={"batch": batch, "batch_per_worker": None})
        return peak_lr(changed.resolved(1))

    def way(workers: int) -> Any:
        return best_way(
            plan.calibration, plan.known, plan.question, progress, workers, asked.most_per_worker
        )

    one, goals = way(1), [way(row.workers) for row in plan.rows]
    chosen = recommend(goals, asked.deadline_seconds, asked.budget, asked.price)
    threads = plan.calibration.facts.get("threads", 1)
    cores = threads if isinstance(threads, int) else 1
    return GoalFigures(
        as_text(goals, one, progress, chosen, lr, asked.price, cores, asked.goal),
        as_plain(goals, one, progress, chosen, lr, asked.price),
    )
