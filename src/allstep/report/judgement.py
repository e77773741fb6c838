"""A judgement on a run: what was found, the figures behind it, and what to do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from allstep.runlog import RunRecord


@dataclass(frozen=True)
class Judgement:
    """A finding about a run: a short title, the figures behind it, and advice."""

    rule: str
    """Name of the rule that made it."""
    severity: Literal["problem", "hint", "good"]
    title: str
    figures: str
    advice: str = ""


Rule = Callable[[RunRecord], Judgement | None]
