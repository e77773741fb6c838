"""The table of training, validation and test scores, with the gap between the first two."""

from collections.abc import Callable
from dataclasses import dataclass

from allstep.console.quantities import count, figure, percent
from allstep.report.compared import Compared, Measured, compared
from allstep.runlog import RunRecord

_NOT_KNOWN = "–"


@dataclass(frozen=True)
class Scores:
    """The rows of one run in the table: each has a name, then a cell for each of COLUMNS."""

    rows: tuple[tuple[str, ...], ...]
    is_evaluated: bool
    """Whether the training column is a sample in evaluation mode instead of the last steps."""


COLUMNS = ("training", "validation", "gap", "test")


def scores(record: RunRecord) -> Scores | None:
    """Return the scores of a run; None if nothing was evaluated."""
    found = compared(record)
    if found.validation is None and found.test is None:
        return None
    return Scores(
        (_row("accuracy", found, _accuracy, _points), _row("loss", found, _loss, _difference)),
        found.is_evaluated,
    )


def _row(
    name: str, found: Compared, cell: Callable[[Measured], str], gap: Callable[[Compared], str]
) -> tuple[str, ...]:
    train, validation, test = (
        _NOT_KNOWN if each is None else cell(each)
        for each in (found.train, found.validation, found.test)
    )
    # The error of training steps is shown, but a gap to it would not be comparable.
    return name, train, validation, gap(found) if found.is_evaluated else _NOT_KNOWN, test


def _accuracy(each: Measured) -> str:
    return percent(1 - each.error, 2) + (f" of {count(each.count)}" if each.count else "")


def _loss(each: Measured) -> str:
    return _NOT_KNOWN if each.loss is None else figure(each.loss)


def _points(found: Compared) -> str:
    return (
        _NOT_KNOWN
        if found.gap is None
        else f"{-100 * found.gap:+.1f} ± {100 * found.noise:.1f} points"
    )


def _difference(found: Compared) -> str:
    train, validation = found.train, found.validation
    if train is None or validation is None or train.loss is None or validation.loss is None:
        return _NOT_KNOWN
    difference = validation.loss - train.loss
    return ("+" if difference > 0 else "") + figure(difference)
