"""The plot of a plan: speed by number of workers, and the parts of the step as a stack."""

from pathlib import Path

from allstep.errors import ConfigError
from allstep.plan.answers.plan_table import Plan
from allstep.plan.prediction import PARTS

_COLORS = ("#4c78a8", "#9ecae9", "#f58518", "#e45756", "#54a24b", "#b79a20")


def draw(plan: Plan, file: Path) -> None:
    """Write the plot of a plan to `file`; raise ConfigError if that fails."""
    # Slow to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    workers = [row.workers for row in plan.rows]
    speeds = [row.samples_per_second for row in plan.rows]
    ideal = [each * plan.one.samples_per_second for each in workers]
    left.loglog(workers, ideal, "--", color="gray", label="as many times one worker")
    left.loglog(workers, speeds, "o-", color=_COLORS[0], label="predicted")
    if plan.changed:
        faster = [row.samples_per_second for row in plan.changed]
        left.loglog(workers, faster, "s:", color=_COLORS[3], label=f"with {plan.asked}")
    left.axvline(plan.known.checked, color="gray", linewidth=0.7)
    left.annotate(
        "measured up to here",
        (plan.known.checked, speeds[0]),
        rotation=90,
        xytext=(3, 0),
        textcoords="offset points",
        fontsize=8,
        color="gray",
    )
    left.set_xlabel("workers")
    left.set_ylabel("images/s")
    left.legend()
    places = range(len(plan.rows))
    bottom = [0.0] * len(plan.rows)
    for name, color in zip(PARTS, _COLORS, strict=True):
        values = [row.parts[name] / row.seconds for row in plan.rows]
        if max(values) < 0.0005:
            continue
        right.bar(places, values, bottom=bottom, color=color, label=name, width=0.8)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    right.set_xticks(list(places), [f"{each:,}" for each in workers], rotation=45)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_xlabel("workers")
    right.set_ylabel("part of a step")
    right.legend(fontsize=8, loc="lower left")
    figure.suptitle(f"{plan.title}: {plan.scaling} (level {plan.known.level} of knowledge)")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file}: {error}") from error
