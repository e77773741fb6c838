"""A study: two pure functions of the results so far.

    wanted(results)                 all trials to run as far as known now, the most urgent first
    stop(trial, record, results)    the reason to end a running trial early, or None

A grid wants the same trials whatever the results are. A search wants a first trial, and with its
result a second; the same results give the same trials again. So the run folders are the only state
of a study, and it resumes after a kill at any time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.runlog import RunRecord
from allstep.study.trial import Results, Trial

Wanted = Callable[[Results], Sequence[Trial]]
Stop = Callable[[Trial, RunRecord, Results], str | None]


@dataclass(frozen=True)
class Study:
    """Many runs that answer one question."""

    arguments: Mapping[str, Any]
    """All values that decide which trials are wanted, as JSON values.

    A folder whose study has other arguments is refused.
    """
    wanted: Wanted
    """Returns the trials to run, given the results so far."""
    most: int
    """Upper limit of the number of trials, whatever the results are."""
    stop: Stop | None = None
    """Returns the reason to end a running trial early, or None; without it, no trial is stopped."""
    growing: frozenset[str] = frozenset()
    """Names of arguments that may gain entries, or become larger, when the study is resumed.

    Such a change adds trials and changes none.
    """
    precision: str | None = None
    """Precision of all trials, if it was chosen for the machine; the folder stores it.

    None means that the arguments decide it.
    """


def grid(
    trials: Sequence[Trial],
    arguments: Mapping[str, Any],
    growing: frozenset[str] = frozenset(),
    precision: str | None = None,
) -> Study:
    """Return a study that wants exactly `trials`; for the other arguments see `Study`."""
    return Study(arguments, lambda _: trials, len(trials), growing=growing, precision=precision)
