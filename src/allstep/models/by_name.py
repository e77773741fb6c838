"""Make a model from its name in a config: a reference model or a factory of the user's.

```
name      "resnet50", or "package.module:factory" (`user_factory`)
  |
factory   called with those of num_classes, shape, channels and norm that it takes,
  |       and with all of the options
model     a user's model is called with one image of zeros: it must return
          logits (1, num_classes)
```

`shape` is (channels, height, width) of an image, `norm` makes a norm layer from a number of
channels. A factory that does not need one of them omits it: `def factory(num_classes)` is enough.
Options that the factory does not have are errors. A model takes images (n, channels, height,
width) and returns one tensor of logits (n, num_classes), in training and in evaluation; a tuple
(GoogLeNet's side exits in other libraries) is rejected here, before training.

`check_name`, `check_options` and `check_shape` do not import torch, so that a launcher can call
them before any worker starts.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from allstep.errors import ConfigError, UserError, cut, did_you_mean
from allstep.models.options import (
    DROPOUT,
    HIDDEN,
    Check,
    channels,
    check_values,
    real,
    truth,
    whole,
)
from allstep.models.user_factory import (
    Shape,
    check_factory_name,
    current_folder,
    import_factory,
    in_one_line,
    kind_of,
    try_model,
)

if TYPE_CHECKING:
    from torch import nn

    from allstep.models.norms import Norm


@dataclass(frozen=True)
class Named:
    """Description of a reference model, available without importing torch."""

    home: str
    """Module in `allstep.models` and name of the factory: "module:factory"."""
    smallest: int = 1
    """Smallest height and width of an image, in pixels."""
    sized: bool = False
    """Whether the model takes only images of the size that it was made for."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory that follow from the name, such as the depth."""
    options: Mapping[str, Check] = field(default_factory=dict)
    """Further arguments of the factory, each with the check of its value."""


GIVEN = ("num_classes", "shape", "channels", "norm")
"""Arguments that every factory is called with, unless it does not have them."""

NAMES: Mapping[str, Named] = {
    "small-cnn": Named(
        "cnn:SmallCnn", sized=True, options={"widths": channels(0, 16), "hidden": HIDDEN}
    ),
    "lenet": Named(
        "lenet:LeNet",
        4,
        sized=True,
        options={"widths": channels(2, 2), "hidden": HIDDEN, "dropout": DROPOUT},
    ),
    "alexnet": Named("alexnet:AlexNet", 63, options={"dropout": DROPOUT}),
    "googlenet": Named("googlenet:GoogLeNet", 15, options={"dropout": DROPOUT}),
    "vgg16": Named("vgg:Vgg16", 32, options={"hidden": HIDDEN, "dropout": DROPOUT}),
    **{
        f"resnet{depth}": Named(
            f"resnet:resnet{depth}", options={"zero_last_norm": truth, "small_pictures": truth}
        )
        for depth in (18, 34, 50, 101)
    },
    **{
        f"cifar-resnet{depth}": Named(
            "wide_resnet:CifarResNet",
            settled={"depth": depth},
            options={"zero_last_norm": truth, "skip": truth},
        )
        for depth in (20, 32, 44, 56, 110)
    },
    "wide-resnet": Named(
        "wide_resnet:WideResNet",
        options={"depth": whole(10, 400), "widen": whole(1, 32), "dropout": DROPOUT},
    ),
    "speedy": Named(
        "speedy:Speedy", 9, options={"widths": channels(3, 3), "scale": real(1e-6, 1e6)}
    ),
}
"""The reference models."""


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is in `NAMES` or is a factory in a module that exists."""
    if ":" in name:
        check_factory_name(name)
    elif name not in NAMES:
        own = "one of your own is written package.module:factory"
        raise ConfigError(f"no model is called {cut(name)!r} ({own}); {did_you_mean(name, NAMES)}")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if a reference model does not have an option, or not with its value.

    `options`: further arguments of the factory. Those of a user's factory are not checked here.
    """
    if name in NAMES:
        for key in options:
            _check_option(name, key, NAMES[name].settled, set(NAMES[name].options))
        check_values(NAMES[name].options, options)


def check_shape(name: str, shape: Shape, evaluated: Shape | None = None) -> None:
    """Raise ConfigError if a reference model cannot process images of these shapes.

    `shape` is (channels, height, width) of the images in training, `evaluated` that in evaluation
    (default: the same). A user's model is not checked here.
    """
    model = NAMES.get(name)
    if model is None:
        return
    for each in (shape, evaluated or shape):
        _check_smallest(name, model.smallest, each)
    if model.sized and evaluated is not None and evaluated != shape:
        sizes = " and ".join("x".join(map(str, each[1:])) for each in (shape, evaluated))
        raise ConfigError(
            f"model {name} takes images of one size, and those of training and evaluation have"
            f" {sizes}: let data.augment and data.prepare end at the same"
        )


def _check_smallest(name: str, smallest: int, shape: Shape) -> None:
    """Raise ConfigError if a side of the images has fewer than `smallest` pixels."""
    _, height, width = shape
    if min(height, width) < smallest:
        raise ConfigError(
            f"model {name}: expected images of at least {smallest}x{smallest} pixels, these are"
            f" {height}x{width}: choose a model for smaller ones, such as small-cnn, or enlarge"
            f" them by data.augment and data.prepare: Resize({smallest})"
        )


def make_model(
    name: str,
    *,
    num_classes: int,
    shape: Shape,
    norm: "Norm",
    options: Mapping[str, Any] | None = None,
) -> "nn.Module":
    """Return the model called `name`, a reference model or a user's.

    `shape` is (channels, height, width) of its images; `norm` makes the norm layer for a number of
    channels; `options` are further arguments of its factory. Raise ConfigError, with a message of
    one line, for every error that a user can make.
    """
    check_name(name)
    check_shape(name, shape)
    given = dict(zip(GIVEN, (num_classes, shape, shape[0], norm), strict=True))
    if name in NAMES:
        return _make_reference_model(name, given, options or {})
    with current_folder():
        model = _called(name, import_factory(name), given, options or {}, {})
        try_model(name, model, num_classes, shape)
    return model


def _make_reference_model(
    name: str, given: Mapping[str, Any], options: Mapping[str, Any]
) -> "nn.Module":
    """Return the model of `NAMES` called `name`."""
    named = NAMES[name]
    # Here too: `predict` and `eval` read a run folder's config without a launcher's checks.
    check_options(name, options)
    module, _, factory = named.home.partition(":")
    made_by = getattr(import_module(f"allstep.models.{module}"), factory)
    return _called(name, made_by, given, options, named.settled)


def _called(
    name: str,
    factory: Callable[..., Any],
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    settled: Mapping[str, Any],
) -> "nn.Module":
    """Return what the factory makes; raise ConfigError if it fails or returns no model."""
    from torch import nn

    arguments = {**_arguments(name, factory, given, options, settled), **settled}
    try:
        model = factory(**arguments)
    except UserError as error:
        raise ConfigError(f"model {name}: {error}") from error
    except Exception as error:
        raise ConfigError(f"model {name}: the factory raised {in_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {name}: the factory returned {kind_of(model)}, expected a torch.nn.Module"
        )
    return model


def _arguments(
    name: str,
    factory: Callable[..., Any],
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    settled: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of `given` that the factory has, and all options, which it must have."""
    parameters = _parameters(factory)
    named = {
        key
        for key, each in parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    # Its **kwargs go to another factory, and the number of classes is what every factory has.
    if takes_all:
        named.add("num_classes")
    open_to = named - given.keys() - settled.keys()
    for key in options:
        _check_option(name, key, settled, open_to | {key} if takes_all else open_to)
    for key in parameters:
        needed = key in open_to and parameters[key].default is inspect.Parameter.empty
        if needed and key not in options:
            raise ConfigError(f"model {name} needs the option {key!r}: model.options.{key}=...")
    return {key: value for key, value in given.items() if key in named} | dict(options)


def _check_option(name: str, key: str, settled: Mapping[str, Any], known: set[str]) -> None:
    """Raise ConfigError if the option `key` is set elsewhere or is not among the `known` ones."""
    if key in GIVEN or key in settled:
        raise ConfigError(f"model.options.{key}: {_where_set(key, settled)}, leave it out")
    if key not in known:
        raise ConfigError(f"model {name} has no option {cut(key)!r}; {_nearest(key, known)}")


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the factory; num_classes alone if it has no signature."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {"num_classes": inspect.Parameter("num_classes", inspect.Parameter.KEYWORD_ONLY)}


def _where_set(key: str, settled: Mapping[str, Any]) -> str:
    """Describe what sets the argument `key` instead of an option."""
    if key in settled:
        return f"the model's name sets it to {settled[key]}"
    return {
        "norm": "it is set by model.norm",
        "num_classes": "it is set by the data or data.num_classes",
    }.get(key, "it is taken from the data")


def _nearest(key: str, known: set[str]) -> str:
    """Return the nearest option and the list of all options, which are few."""
    if not known:
        return "it has none"
    near = did_you_mean(key, known)
    every = f"known are: {', '.join(sorted(known))}"
    return near if near == every else f"{near} {every}"
