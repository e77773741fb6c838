"""The reference nets. Each takes its norm as a factory: `norm(channels)` makes a layer."""

from allstep.models.alexnet import AlexNet
from allstep.models.cnn import SmallCnn
from allstep.models.norms import NORMS, Norm

__all__ = ["NORMS", "AlexNet", "Norm", "SmallCnn"]
