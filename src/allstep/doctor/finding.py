"""One thing that the doctor has to say."""

from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """How bad it is."""

    PROBLEM = "problem"  # a run would fail
    WARNING = "warning"  # a run would be slow, fragile or not what was meant
    NOTE = "note"  # good to know


class Finding(NamedTuple):
    """What is wrong, and what to do about it: one line each."""

    severity: Severity
    what: str
    do: str


def problem(what: str, do: str) -> Finding:
    return Finding(Severity.PROBLEM, what, do)


def warning(what: str, do: str) -> Finding:
    return Finding(Severity.WARNING, what, do)


def note(what: str, do: str) -> Finding:
    return Finding(Severity.NOTE, what, do)
