"""The table of goodput: for each number of workers the best batch, and what the goal costs."""

from collections.abc import Callable, Sequence
from typing import Any

from allstep.console.markdown_table import table
from allstep.console.quantities import about, count, figure, percent
from allstep.plan.answers.goodput import Goal, Progress, Recommendation, efficiency


def as_text(
    goals: Sequence[Goal],
    one: Goal,
    progress: Progress,
    chosen: Recommendation,
    lr: Callable[[int], float],
    price: float | None,
    threads: int,
    goal: float | None,
) -> str:
    """Return the table, where it comes from, and the recommendation.

    lr: the recipe's learning rate for a batch. threads: cores of a worker, for core-hours.
    """
    cost = "worker-hours" if price is None and threads == 1 else "core-hours"
    cost = cost if price is None else "money"
    times = "time, relative" if progress.is_ratio else "time"
    head = ["workers", "best batch", "by formula", "lr", "updates", times, cost, "goodput eff."]
    rows = [_cells(each, one, progress, lr, price, threads) for each in goals]
    what = "Time to the goal" if goal is None else f"Time to {goal:g} validation accuracy"
    critical = count(progress.critical_batch)
    lines = [
        f"{what}, updates(B) = Smin + Emin / B; critical batch {critical} ({progress.source}).",
        table(head, rows),
        _sentence(chosen, progress),
    ]
    if progress.is_ratio:
        lines.insert(1, "Only the noise scale is known: times are ratios, hours are unknown.")
    return "\n\n".join(lines) + "\n"


def _cells(
    each: Goal,
    one: Goal,
    progress: Progress,
    lr: Callable[[int], float],
    price: float | None,
    threads: int,
) -> list[str]:
    relative = each.seconds / one.seconds
    spent = each.worker_hours * (threads if price is None else price)
    if progress.is_ratio:
        spent = each.worker_hours / one.worker_hours
    return [
        f"{each.workers:,}",
        f"{each.batch:,}",
        count(round(each.closed_form)),
        figure(lr(each.batch)),
        "" if progress.is_ratio else count(round(progress.updates(each.batch))),
        f"{relative:.3g}" if progress.is_ratio else about(each.seconds),
        f"{spent:.3g}" + (" x" if progress.is_ratio else ""),
        percent(efficiency(each, one), 0),
    ]


def _sentence(found: Recommendation, progress: Progress) -> str:
    if found.chosen is None:
        return f"Recommended: none of these numbers of workers ({found.rule})."
    chosen = found.chosen
    hours = "" if progress.is_ratio else f", {about(chosen.seconds)}"
    what = f"{chosen.workers:,} workers with batch {chosen.batch:,}{hours}"
    return f"Recommended: {what} ({found.rule})."


def as_plain(
    goals: Sequence[Goal],
    one: Goal,
    progress: Progress,
    chosen: Recommendation,
    lr: Callable[[int], float],
    price: float | None,
) -> dict[str, Any]:
    """Return all figures as JSON values."""
    return {
        "source": progress.source,
        "critical_batch": progress.critical_batch,
        "hours_are_known": not progress.is_ratio,
        "rule": chosen.rule,
        "recommended": None if chosen.chosen is None else chosen.chosen.workers,
        "rows": [
            {
                "workers": each.workers,
                "batch": each.batch,
                "batch_by_formula": each.closed_form,
                "lr": lr(each.batch),
                "updates": None if progress.is_ratio else progress.updates(each.batch),
                "seconds": None if progress.is_ratio else each.seconds,
                "relative_time": each.seconds / one.seconds,
                "worker_hours": None if progress.is_ratio else each.worker_hours,
                "money": None if price is None or progress.is_ratio else price * each.worker_hours,
                "goodput_efficiency": efficiency(each, one),
            }
            for each in goals
        ],
    }
