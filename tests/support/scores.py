"""Scores and tallies of classification, for tests."""

from allstep.train.task.classification import Classification
from allstep.train.task.tally import Tally
from allstep.train.watch.events import Figures, Score

FIGURES: Figures = Classification(10).figures()
"""How the figures of a classification with 10 classes are shown."""


def classified(loss: float, accuracy: float, count: int, top5: float = 0.0) -> Score:
    """Return the score of a classification."""
    return Score(loss, count, {"accuracy": accuracy, "top5": top5})


def classified_tally(loss: float, correct: float, top5: float, count: float) -> Tally:
    """Return the tally of a classification in training."""
    return Tally.of_training(Classification(10)).with_sums([loss, count, count, correct, top5])
