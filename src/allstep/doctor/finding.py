"""Findings of the doctor: what is wrong, how severe it is, and what to do."""

from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """Severity of a finding."""

    PROBLEM = "problem"
    """A run would fail."""
    WARNING = "warning"
    """A run would be slow, fragile or not what was meant."""
    NOTE = "note"
    """Useful to know; a run works."""


class Finding(NamedTuple):
    """What is wrong (`what`) and what to do about it (`do`), one line each."""

    severity: Severity
    what: str
    do: str


def problem(what: str, do: str) -> Finding:
    """Return a finding with which a run would fail."""
    return Finding(Severity.PROBLEM, what, do)


def warning(what: str, do: str) -> Finding:
    """Return a finding with which a run would be slow, fragile or not what was meant."""
    return Finding(Severity.WARNING, what, do)


def note(what: str, do: str) -> Finding:
    """Return a finding that is useful to know."""
    return Finding(Severity.NOTE, what, do)
