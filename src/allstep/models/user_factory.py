"""Find, import, check and try the factory of a user's model: "package.module:factory".

A user's module is searched in the current folder first, as with `python -m`, then among the
installed modules. It is never a module of Python's standard library, and the factory is a subclass
of `nn.Module` or a Python function, so that a config cannot name `os:system`. `train.config.trust`
decides which configs may name a factory at all.

`check_factory_name` and `module_place` import neither torch nor the user's module.
"""

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from allstep.errors import ConfigError, cut, did_you_mean

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, int, int]
"""Channels, height and width of an image."""


def check_factory_name(name: str) -> None:
    """Raise ConfigError unless `name` is package.module:factory in a module that exists."""
    module, _, factory = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *factory.split(".")]):
        raise ConfigError(
            f"model {cut(name)!r}: expected package.module:factory, such as models.small:make"
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
    """Return the path from which the factory `name` would be imported; None if there is none."""
    return _place(name.partition(":")[0].partition(".")[0])


def _place(top: str) -> str | None:
    """Return the path of a top-level module or package, without executing it."""
    with current_folder():
        try:
            spec = find_spec(top)
        except ValueError:
            # The script itself: it has been imported, but not by its name.
            return str(getattr(sys.modules.get(top), "__file__", None))
    if spec is None:
        return None
    if spec.has_location and spec.origin is not None:
        return str(Path(spec.origin).absolute())
    # A package without __init__.py has folders only, a built-in module neither.
    return next(iter(spec.submodule_search_locations or ()), str(spec.origin))


def _is_standard(top: str, place: str) -> bool:
    """Return whether a module belongs to Python itself.

    `sys.stdlib_module_names` lacks Python's tests, so the path is checked, too.
    """
    library = Path(sysconfig.get_path("stdlib"))
    if not Path(place).is_relative_to(library):
        return top in sys.stdlib_module_names
    return Path(place).relative_to(library).parts[0] not in ("site-packages", "dist-packages")


def import_factory(name: str) -> Callable[..., Any]:
    """Import the user's module and return its factory; raise ConfigError if that fails."""
    module, _, _ = name.partition(":")
    try:
        home = import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and _is_within(module, error.name):
            raise _no_module(name, str(error.name)) from error
        message = f"model {name}: importing {module} failed: {in_one_line(error)}"
        raise ConfigError(message) from error
    factory = _attribute(home, name)
    _check_kind(name, factory)
    _check_origin(name, factory)
    return factory  # type: ignore[no-any-return]


def _is_within(module: str, package: str | None) -> bool:
    """Return whether a module is this package or a part of it."""
    return package is not None and (module == package or module.startswith(f"{package}."))


def _attribute(home: ModuleType, name: str) -> Any:
    """Return the factory that `name` names in its module `home`."""
    module, _, path = name.partition(":")
    found: Any = home
    for part in path.split("."):
        if not hasattr(found, part):
            named = did_you_mean(part, _public_callables(found))
            raise ConfigError(f"model {name}: {module} has no {part!r}; {named}")
        found = getattr(found, part)
        if isinstance(found, ModuleType):
            raise ConfigError(
                f"model {name}: {part!r} is a module that {module} has imported, expected a"
                " function or class"
            )
    return found


def _public_callables(home: Any) -> list[str]:
    values = vars(home).items()
    return [name for name, value in values if callable(value) and not name.startswith("_")]


def _check_kind(name: str, factory: Any) -> None:
    """Raise ConfigError unless the factory is a subclass of nn.Module or a Python function."""
    from torch import nn

    if not callable(factory):
        raise ConfigError(
            f"model {name}: it is {kind_of(factory)}, expected a function or class that makes a"
            " model"
        )
    is_model = isinstance(factory, type) and issubclass(factory, nn.Module)
    if not is_model and not inspect.isfunction(getattr(factory, "__func__", factory)):
        what = f"the class {factory.__name__}" if isinstance(factory, type) else kind_of(factory)
        raise ConfigError(
            f"model {name}: it is {what}, expected a subclass of torch.nn.Module or a Python"
            " function"
        )


def _check_origin(name: str, factory: Any) -> None:
    """Raise ConfigError if the factory belongs to Python's standard library.

    A user's module may have imported it: `from subprocess import run`.
    """
    written = str(getattr(factory, "__module__", "")).partition(".")[0]
    if written in sys.stdlib_module_names:
        raise ConfigError(
            f"model {name}: it belongs to {written!r} of Python's standard library, expected code"
            " of your own"
        )


def try_model(name: str, model: "nn.Module", num_classes: int, shape: Shape) -> None:
    """Call a user's model with one image of zeros, so that an error occurs before training.

    Raise ConfigError unless it returns logits (1, num_classes). The model and the state of the
    random numbers do not change.
    """
    import torch

    logits = _logits_of_zeros(name, model, shape)
    if not isinstance(logits, torch.Tensor):
        raise ConfigError(
            f"model {name}: it returned {kind_of(logits)}, expected one tensor of logits (n,"
            f" {num_classes})"
        )
    if logits.shape != (1, num_classes):
        raise ConfigError(
            f"model {name}: one image gave logits of shape {tuple(logits.shape)}, expected (1,"
            f" {num_classes}), one for each class"
        )


def _logits_of_zeros(name: str, model: "nn.Module", shape: Shape) -> Any:
    """Return what the model returns for one image of zeros, in evaluation mode."""
    import torch

    like = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    training = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return model.eval()(torch.zeros(1, *shape, device=like.device, dtype=like.dtype))
    except Exception as error:
        size = " x ".join(map(str, shape))
        message = f"model {name}: it cannot take an image of {size}: {in_one_line(error)}"
        raise ConfigError(message) from error
    finally:
        for module, was in training:
            module.training = was


def in_one_line(error: BaseException) -> str:
    """Return the type, the message and the place of an error in the user's code, in one line."""
    text = " ".join(str(error).split())
    text = f"{text[:300]} ..." if len(text) > 300 else text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    # The messages of these errors contain the place.
    if isinstance(error, SyntaxError | ModuleNotFoundError):
        place = ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def kind_of(value: Any) -> str:
    """Return the type of a value with its article, for a message: "an int", "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _no_module(name: str, module: str) -> ConfigError:
    """Return the error for a module that was not found."""
    return ConfigError(
        f"model {name}: there is no module {module!r} in {Path.cwd()} nor among the installed"
        " packages"
    )


@contextmanager
def current_folder() -> Iterator[None]:
    """Make the current folder the first one in which modules are searched."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    invalidate_caches()
    try:
        yield
    finally:
        # A user's module may have changed the list.
        with suppress(ValueError):
            sys.path.remove(folder)
