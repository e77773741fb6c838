"""The reference nets. Each takes its norm as a factory: `norm(channels)` makes a layer."""

from allstep.models.alexnet import AlexNet
from allstep.models.cnn import SmallCnn
from allstep.models.norms import NORMS, Norm
from allstep.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101

__all__ = ["NORMS", "AlexNet", "Norm", "ResNet", "SmallCnn", "resnet18", "resnet34", "resnet50", "resnet101"]
