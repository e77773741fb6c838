"""The reference nets. Each takes its norm as a factory: `norm(channels)` makes a layer."""

from allstep.models.alexnet import AlexNet
from allstep.models.cnn import SmallCnn
from allstep.models.googlenet import GoogLeNet
from allstep.models.lenet import LeNet
from allstep.models.norms import NORMS, Norm
from allstep.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101
from allstep.models.speedy import Speedy
from allstep.models.vgg import Vgg16
from allstep.models.wide_resnet import CifarResNet, WideResNet

__all__ = [
    "NORMS",
    "AlexNet",
    "CifarResNet",
    "GoogLeNet",
    "LeNet",
    "Norm",
    "ResNet",
    "SmallCnn",
    "Speedy",
    "Vgg16",
    "WideResNet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
]
