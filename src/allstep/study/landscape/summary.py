"""A landscape as text: names and values of the table that the command prints."""

from allstep.console.quantities import figure, percent
from allstep.study.landscape.points import DISTANCE, shown
from allstep.study.landscape.result import Around, Flatness, Line, Number

Rows = list[tuple[str, str]]


def around_rows(found: Around) -> Rows:
    """Return the rows about the loss around a run."""
    return [
        (
            "center",
            f"loss {loss_text(found.center.loss)}, accuracy {_share(found.center.accuracy)}",
        ),
        ("points", f"{shown(found.grid)}, from -1 to 1 norms of the filters: {range_text(found)}"),
        ("flatness", flatness_text(found.flatness)),
        ("running statistics", found.statistics),
    ]


def line_rows(line: Line) -> Rows:
    """Return the rows about the line to the second run."""
    return [
        (
            "second run",
            f"{line.runs[1]}: loss {loss_text(line.losses[-1])}, accuracy"
            f" {_share(line.accuracies[-1])}",
        ),
        ("line between them", barrier_text(line)),
        ("flatness of the second", flatness_text(line.flatness[1])),
        ("on the same directions", comparison_text(line)),
        ("running statistics, line", line.statistics),
    ]


def loss_text(loss: Number) -> str:
    """Return a loss as `allstep eval` prints it."""
    return "not finite" if loss is None else f"{loss:.4f}"


def range_text(found: Around) -> str:
    """Return the smallest and the largest loss of the grid."""
    known = [loss for loss in found.losses if loss is not None]
    lost = len(found.losses) - len(known)
    more = f", not finite at {lost:,} points" if lost else ""
    return f"loss {figure(min(known))} to {figure(max(known))}{more}" if known else "no finite loss"


def flatness_text(flatness: Flatness) -> str:
    """Return the flatness figure as text."""
    mean, std, count = flatness.mean, flatness.std, len(flatness.rises)
    where = f"at {DISTANCE:g} of the filters' norm (mean and std of {count} directions)"
    if mean is None:
        lost = sum(rise is None for rise in flatness.rises)
        return f"the loss is not finite {where.partition(' (')[0]} in {lost} of {count} directions"
    return f"the loss rises by {figure(mean)} ± {figure(std or 0.0)} {where}"


def barrier_text(line: Line) -> str:
    """Return where the line is highest, and how much higher than its ends."""
    known = [(loss, i) for i, loss in enumerate(line.losses) if loss is not None]
    ends = [line.losses[0], line.losses[-1]]
    if len(known) < len(line.losses) or None in ends:
        return "the loss is not finite at some points"
    highest, at = max(known)
    above = highest - max(loss for loss in ends if loss is not None)
    place = f"at {percent(at / (len(line.losses) - 1), 0)} of the way"
    if above <= 0:
        return "no barrier: the loss is nowhere higher than at the ends"
    return f"loss {figure(highest)} {place}: a barrier of {figure(above)} above the higher end"


def comparison_text(line: Line) -> str:
    """Return which of two runs is flatter on the same directions, and how surely.

    The difference is taken direction by direction, so its std is that of pairs.
    """
    first, second = line.flatness
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(first.rises, second.rises, strict=False)
        if mine is not None and theirs is not None
    ]
    if len(pairs) < max(len(first.rises), len(second.rises)):
        return "not comparable: the loss is not finite in some directions"
    gaps = Flatness(tuple(theirs - mine for mine, theirs in pairs))
    assert gaps.mean is not None and gaps.std is not None
    more = sum(theirs > mine for mine, theirs in pairs)
    what = "more" if gaps.mean > 0 else "less"
    count = more if gaps.mean > 0 else len(pairs) - more
    return (
        f"{line.runs[1]} rises by {figure(abs(gaps.mean))} ± {figure(gaps.std)} {what} than"
        f" {line.runs[0]}, in {count} of {len(pairs)} directions"
    )


def _share(accuracy: Number) -> str:
    return "unknown" if accuracy is None else f"{accuracy:.2%}"
