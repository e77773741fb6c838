"""What a study asks: two functions of the results so far.

    wanted(results)                 all trials that should be run as far as one knows now, the most urgent first
    stop(trial, record, results)    why a running trial should end early; None: it should not

Both are pure. A grid wants the same trials whatever the results are. A search wants a first trial,
and with its result a second; asked again with the same results it wants the same again. So a study
has no state but its run folders, and goes on after any kill as if nothing had happened.
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
    """A question that many runs answer."""

    arguments: Mapping[str, Any]
    """All that decides which trials it wants, as plain values: a folder that holds another study is
    refused by these."""
    wanted: Wanted
    most: int
    """How many trials it wants at most, whatever the results are."""
    stop: Stop | None = None
    growing: frozenset[str] = frozenset()
    """Arguments that may gain entries, or larger numbers, in a folder that holds the study already:
    they add trials and change none."""
    precision: str | None = None
    """Of all trials, where it was chosen for the machine: the folder keeps it.

    None: the arguments decide it.
    """


def grid(
    trials: Sequence[Trial],
    arguments: Mapping[str, Any],
    growing: frozenset[str] = frozenset(),
    precision: str | None = None,
) -> Study:
    """The study that wants just these."""
    return Study(arguments, lambda _: trials, len(trials), growing=growing, precision=precision)
