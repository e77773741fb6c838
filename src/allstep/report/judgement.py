"""A judgement on a run: one sentence, the figures that led to it, and what to do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from allstep.runlog import RunRecord


@dataclass(frozen=True)
class Judgement:
    """One sentence on what is seen, the figures, and what to do."""

    rule: str
    severity: Literal["problem", "hint", "good"]
    title: str
    figures: str
    advice: str = ""


Rule = Callable[[RunRecord], Judgement | None]
