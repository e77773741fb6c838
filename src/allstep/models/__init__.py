"""The reference models. Each takes its norm as a factory: `norm(channels)` makes a layer.

`by_name` makes a reference model, or a user's model (`user_factory`), from its name. Everything
except the names and their checks needs torch, so it is imported at its first use (PEP 562): a
launcher can check a name without the second that importing torch takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.models.by_name import NAMES, check_name, check_shape, make_model

if TYPE_CHECKING:
    from allstep.models.alexnet import AlexNet
    from allstep.models.cnn import SmallCnn
    from allstep.models.googlenet import GoogLeNet
    from allstep.models.lenet import LeNet
    from allstep.models.norms import NORMS, Norm, make_norm
    from allstep.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet101
    from allstep.models.speedy import Speedy
    from allstep.models.vgg import Vgg16
    from allstep.models.wide_resnet import CifarResNet, WideResNet

__all__ = [
    "NAMES",
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
    "check_name",
    "check_shape",
    "make_model",
    "make_norm",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
]

_LATER = {
    "AlexNet": "alexnet",
    "CifarResNet": "wide_resnet",
    "GoogLeNet": "googlenet",
    "LeNet": "lenet",
    "NORMS": "norms",
    "Norm": "norms",
    "ResNet": "resnet",
    "SmallCnn": "cnn",
    "Speedy": "speedy",
    "Vgg16": "vgg",
    "WideResNet": "wide_resnet",
    "make_norm": "norms",
    "resnet18": "resnet",
    "resnet34": "resnet",
    "resnet50": "resnet",
    "resnet101": "resnet",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(
            f"module 'allstep.models' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(f"allstep.models.{_LATER[name]}"), name)
