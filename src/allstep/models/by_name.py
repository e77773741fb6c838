"""A model from its name, as a config has it: one of ours ("resnet50"), or a user's factory
("package.module:factory").

```
name ----> factory -------called with what it takes of-------> model ----one image of zeros, if it is a user's----> model
            num_classes, shape, channels, norm                      logits (1, num_classes), or an error
            and all of the options
```

`shape` is (channels, height, width) of an image, `norm` makes a norm layer from a number of
channels. A factory that does not want one of them leaves it out: `def factory(num_classes)` is
enough. Options it does not know are errors. A model takes images (n, channels, height, width) and
returns one tensor of logits (n, num_classes), in training and in evaluation; a tuple (GoogLeNet's
side exits in other libraries) is refused here, before training.

A user's module is looked for in the current folder first, as with `python -m`, then among what is
installed. It is never one of Python's standard library, and the factory is a subclass of
`nn.Module` or a Python function, so that a config cannot name `os:system`. Which configs may name a
factory at all is decided by `train.config.trust`.

`check_name`, `check_options` and `check_shape` need no torch, so that a launcher can call them
before any worker starts.
"""

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
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

if TYPE_CHECKING:
    from torch import nn

    from allstep.models.norms import Norm

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Named:
    """One of our models."""

    home: str
    """Module and name of its factory."""
    smallest: int = 1
    """Pixels that a side of an image has at least."""
    sized: bool = False
    """Whether it takes images of one size only: the one that it was made for."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that its name says."""
    options: Mapping[str, Check] = field(default_factory=dict)
    """What else it can be called with, as its factory has it, and what each may be; without torch.
    """


GIVEN = ("num_classes", "shape", "channels", "norm")
"""What every factory is called with, as far as it takes it."""

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
            "wide_resnet:CifarResNet", settled={"depth": depth}, options={"zero_last_norm": truth}
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
"""Our models."""


def check_name(name: str) -> None:
    """ConfigError unless `name` is one of `NAMES`, or a factory's whose module can be looked for."""
    if ":" not in name:
        if name not in NAMES:
            own = "one of your own is written package.module:factory"
            raise ConfigError(
                f"no net is called {cut(name)!r} ({own}); {did_you_mean(name, NAMES)}"
            )
        return
    module, _, factory = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *factory.split(".")]):
        raise ConfigError(
            f"model {cut(name)!r}: expected package.module:factory, such as nets.small:make"
        )
    top = module.partition(".")[0]
    if (place := _place(top)) is None:
        raise _no_module(name, top)
    if _is_standard(top, place):
        raise ConfigError(
            f"model {name}: {top!r} is a module of Python's standard library; expected one of your"
            " own, under another name"
        )


def module_place(name: str) -> str | None:
    """Return where the factory `name` would be imported from; None when there is no such module."""
    return _place(name.partition(":")[0].partition(".")[0])


def _place(top: str) -> str | None:
    """Of a module that stands in no package. Nothing of it is executed."""
    with _current_folder():
        try:
            spec = find_spec(top)
        except ValueError:
            # Of a script: it has been imported, but not by its name.
            return str(getattr(sys.modules.get(top), "__file__", None))
    if spec is None:
        return None
    if spec.has_location and spec.origin is not None:
        return str(Path(spec.origin).absolute())
    # A package without __init__.py has folders only, a built-in module neither.
    return next(iter(spec.submodule_search_locations or ()), str(spec.origin))


def _is_standard(top: str, place: str) -> bool:
    """Whether a module belongs to Python itself.

    The list lacks its tests, so the place counts, too.
    """
    library = Path(sysconfig.get_path("stdlib"))
    if not Path(place).is_relative_to(library):
        return top in sys.stdlib_module_names
    return Path(place).relative_to(library).parts[0] not in ("site-packages", "dist-packages")


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """ConfigError when one of our models does not take one of the options, or not its value.

    Of a user's model nothing is known.
    """
    if name in NAMES:
        for key in options:
            _check_option(name, key, NAMES[name].settled, set(NAMES[name].options))
        check_values(NAMES[name].options, options)


def check_shape(name: str, shape: Shape, evaluated: Shape | None = None) -> None:
    """ConfigError when the model cannot take images of `shape` (channels, height, width), or those
    that it is evaluated on.

    Of a user's model nothing is known.
    """
    model = NAMES.get(name)
    if model is None:
        return
    for _, height, width in (shape, evaluated or shape):
        if min(height, width) < model.smallest:
            raise ConfigError(
                f"model {name}: expected images of at least {model.smallest}x{model.smallest} pixels,"
                f" these are {height}x{width}: choose a net for smaller ones, such as small-cnn, or"
                f" enlarge them by data.augment and data.prepare: Resize({model.smallest})"
            )
    if model.sized and evaluated is not None and evaluated != shape:
        sizes = " and ".join("x".join(map(str, each[1:])) for each in (shape, evaluated))
        raise ConfigError(
            f"model {name} takes images of one size, and those of training and evaluation have"
            f" {sizes}: let data.augment and data.prepare end at the same"
        )


def make_model(
    name: str,
    *,
    num_classes: int,
    shape: Shape,
    norm: "Norm",
    options: Mapping[str, Any] | None = None,
) -> "nn.Module":
    """The model called `name` for images of `shape` (channels, height, width); `options` are
    further arguments of its factory.

    Everything that a user can get wrong is a ConfigError of one line.
    """
    check_name(name)
    check_shape(name, shape)
    given = dict(zip(GIVEN, (num_classes, shape, shape[0], norm), strict=True))
    if name in NAMES:
        named = NAMES[name]
        # Here too: `predict` and `eval` read a run folder's config without a launcher's checks.
        check_options(name, options or {})
        factory = _attribute(
            import_module(f"allstep.models.{named.home.partition(':')[0]}"), named.home
        )
        return _called(name, factory, given, options or {}, named.settled)
    with _current_folder():
        model = _called(name, _users_factory(name), given, options or {}, {})
        _try(name, model, num_classes, shape)
    return model


def _called(
    name: str,
    factory: Callable[..., Any],
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    settled: Mapping[str, Any],
) -> "nn.Module":
    from torch import nn

    arguments = {**_arguments(name, factory, given, options, settled), **settled}
    try:
        model = factory(**arguments)
    except UserError as error:
        raise ConfigError(f"model {name}: {error}") from error
    except Exception as error:
        raise ConfigError(f"model {name}: the factory raised {_in_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model {name}: the factory returned {_kind(model)}, expected a torch.nn.Module"
        )
    return model


def _arguments(
    name: str,
    factory: Callable[..., Any],
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    settled: Mapping[str, Any],
) -> dict[str, Any]:
    """Of what is given all that the factory takes, and the options, which it must take."""
    parameters = _parameters(factory)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    by_name = {
        key
        for key, each in parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    if (
        takes_all
    ):  # it passes on what it gets, and the number of classes is what every factory knows
        by_name.add("num_classes")
    open_to = by_name - given.keys() - settled.keys()
    for key in options:
        _check_option(name, key, settled, open_to | {key} if takes_all else open_to)
    arguments = {key: value for key, value in given.items() if key in by_name} | dict(options)
    for key in parameters:
        if (
            key in open_to
            and key not in options
            and parameters[key].default is inspect.Parameter.empty
        ):
            raise ConfigError(f"model {name} needs the option {key!r}: model.options.{key}=...")
    return arguments


def _check_option(name: str, key: str, settled: Mapping[str, Any], known: set[str]) -> None:
    if key in GIVEN or key in settled:
        raise ConfigError(f"model.options.{key}: {_whence(key, settled)}, leave it out")
    if key not in known:
        raise ConfigError(f"model {name} has no option {cut(key)!r}; {_nearest(key, known)}")


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """What the factory takes; one that does not say gets the number of classes."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {"num_classes": inspect.Parameter("num_classes", inspect.Parameter.KEYWORD_ONLY)}


def _whence(key: str, settled: Mapping[str, Any]) -> str:
    if key in settled:
        return f"the net's name says that it is {settled[key]}"
    return {
        "norm": "it is set by model.norm",
        "num_classes": "it is set by the data or data.num_classes",
    }.get(key, "it is taken from the data")


def _nearest(key: str, known: set[str]) -> str:
    """The nearest option, and always the list: there are few."""
    if not known:
        return "it has none"
    near = did_you_mean(key, known)
    every = f"known are: {', '.join(sorted(known))}"
    return near if near == every else f"{near} {every}"


def _users_factory(name: str) -> Callable[..., Any]:
    module, _, _ = name.partition(":")
    try:
        home = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise _no_module(name, error.name) from error
        raise ConfigError(
            f"model {name}: importing {module} failed: {_in_one_line(error)}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"model {name}: importing {module} failed: {_in_one_line(error)}"
        ) from error
    factory = _attribute(home, name)
    _check_kind(name, factory)
    return factory  # type: ignore[no-any-return]


def _check_kind(name: str, factory: Any) -> None:
    """ConfigError unless it is a class of models or a Python function of the user's or a package."""
    from torch import nn

    if not callable(factory):
        raise ConfigError(
            f"model {name}: it is {_kind(factory)}, expected a function or class that makes a net"
        )
    is_model = isinstance(factory, type) and issubclass(factory, nn.Module)
    if not is_model and not inspect.isfunction(getattr(factory, "__func__", factory)):
        what = f"the class {factory.__name__}" if isinstance(factory, type) else _kind(factory)
        raise ConfigError(
            f"model {name}: it is {what}, expected a subclass of torch.nn.Module or a Python"
            " function"
        )
    # A user's module may have imported it: `from subprocess import run`.
    written = str(getattr(factory, "__module__", "")).partition(".")[0]
    if written in sys.stdlib_module_names:
        raise ConfigError(
            f"model {name}: it belongs to {written!r} of Python's standard library, expected code"
            " of your own"
        )


def _attribute(home: Any, name: str) -> Any:
    module, _, path = name.partition(":")
    found = home
    for part in path.split("."):
        if not hasattr(found, part):
            public = [
                each
                for each, value in vars(found).items()
                if callable(value) and not each.startswith("_")
            ]
            raise ConfigError(
                f"model {name}: {module} has no {part!r}; {did_you_mean(part, public)}"
            )
        found = getattr(found, part)
        if isinstance(found, ModuleType):
            raise ConfigError(
                f"model {name}: {part!r} is a module that {module} has imported, expected a"
                " function or class"
            )
    return found


def _try(name: str, model: "nn.Module", num_classes: int, shape: Shape) -> None:
    """One image through a user's model, so that what does not fit is told before training.

    The model is left as it was.
    """
    import torch

    like = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    training = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = model.eval()(torch.zeros(1, *shape, device=like.device, dtype=like.dtype))
    except Exception as error:
        size = " x ".join(map(str, shape))
        raise ConfigError(
            f"model {name}: it cannot take an image of {size}: {_in_one_line(error)}"
        ) from error
    finally:
        for module, was in training:
            module.training = was
    if not isinstance(logits, torch.Tensor):
        raise ConfigError(
            f"model {name}: it returned {_kind(logits)}, expected one tensor of logits (n,"
            f" {num_classes})"
        )
    if logits.shape != (1, num_classes):
        raise ConfigError(
            f"model {name}: one image gave logits of shape {tuple(logits.shape)}, expected (1,"
            f" {num_classes}), one for each class"
        )


def _in_one_line(error: BaseException) -> str:
    """Kind, words and place of an error that is not ours."""
    words = " ".join(str(error).split())
    words = f"{words[:300]} ..." if len(words) > 300 else words
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    shown = (
        "" if isinstance(error, SyntaxError | ModuleNotFoundError) else place
    )  # the words of these say where
    return f"{type(error).__name__}: {words}{shown}" if words else f"{type(error).__name__}{shown}"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _no_module(name: str, module: str) -> ConfigError:
    return ConfigError(
        f"model {name}: there is no module {module!r} in {Path.cwd()} nor among what is installed"
    )


@contextmanager
def _current_folder() -> Iterator[None]:
    """The current folder is the first that modules are looked for in."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):  # a user's module may have changed the list
            sys.path.remove(folder)
