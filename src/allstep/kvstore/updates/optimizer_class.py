"""Class and settings of the optimizer that a store runs.

A store gets them from a class and keyword arguments, or from an optimizer that the script has made.
Each worker of a store passes its own; the workers compare the text of both, so nothing is pickled
and no class is imported by name.

`multi_precision=True`, MXNet's name, is a setting of the store: keys in float16 or bfloat16 get
float32 master weights, which the optimizer updates.
"""

import inspect
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from allstep.errors import AllstepError, UserError, did_you_mean
from allstep.parallel.updates.by_owners import needs_whole_parameters

_MASTER = "multi_precision"
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OptimizerClass:
    """An optimizer's class and settings. has_master: whether half-precision keys get masters."""

    cls: type[Optimizer]
    settings: dict[str, Any]
    has_master: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it needs whole layers, because it uses norms of them."""
        return needs_whole_parameters(self.cls)

    @property
    def name(self) -> str:
        """The class with its module."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def make(self, parameters: list[Parameter]) -> Optimizer:
        """Return an optimizer of these parameters."""
        return self.cls(parameters, **self.settings)

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of the weights that the optimizer updates, for keys of type `dtype`."""
        return torch.float32 if self.has_master and dtype in _HALF else dtype

    def to_json(self) -> str:
        """Return class and settings as text, equal for equal optimizers."""
        return json.dumps([self.name, self.settings, self.has_master], sort_keys=True)


def optimizer_class(given: Any, settings: dict[str, Any]) -> OptimizerClass:
    """Return class and settings of `given`, a class of torch.optim or an optimizer.

    settings: keyword arguments of the class, and `multi_precision`.
    """
    settings = dict(settings)
    has_master = bool(settings.pop(_MASTER, False))
    if isinstance(given, Optimizer):
        if settings:
            raise UserError(
                f"set_optimizer: {', '.join(settings)} next to an optimizer, whose own settings"
                " count; pass the class to set them here"
            )
        cls, settings = type(given), _settings_of(given)
    elif isinstance(given, type) and issubclass(given, Optimizer):
        cls = given
    else:
        name = given.__name__ if isinstance(given, type) else repr(given)
        raise UserError(
            f"set_optimizer: {name} is no torch optimizer; expected a class such as torch.optim.SGD"
            " with its settings, or an optimizer"
        )
    plain = {name: _plain(name, each) for name, each in settings.items()}
    found = OptimizerClass(cls, plain, has_master)
    _check_names(found)
    _try_out(found)
    return found


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer whose groups all have the same ones."""
    accepted = inspect.signature(type(optimizer)).parameters
    first, *others = (
        {name: value for name, value in group.items() if name in accepted and name != "params"}
        for group in optimizer.param_groups
    )
    for group in others:
        differing = [name for name in first if group[name] != first[name]]
        if differing:
            raise UserError(
                f"set_optimizer: the parameter groups differ in {', '.join(differing)}; a store has"
                " one setting for all keys: pass the class and its settings"
            )
    return first


def _plain(name: str, value: Any) -> Any:
    """Return a setting as JSON has it; a tensor with one number becomes that number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return tuple(_plain(name, each) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UserError(
        f"set_optimizer: {name}={value!r} is a {type(value).__name__}; expected numbers, text,"
        " booleans or None, which the workers can compare"
    )


def _check_names(chosen: OptimizerClass) -> None:
    """Raise UserError for a setting that the class does not have."""
    accepted = inspect.signature(chosen.cls).parameters
    has_any = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    for name in () if has_any else chosen.settings:
        if name not in accepted or name == "params":
            known = [each for each in accepted if each != "params"]
            raise UserError(
                f"set_optimizer: {chosen.cls.__name__} has no setting {name!r};"
                f" {did_you_mean(name, known)}"
            )


def _try_out(chosen: OptimizerClass) -> None:
    """Make one step with this optimizer, to find settings that it refuses."""
    try:
        parameter = Parameter(torch.zeros(2, 2), requires_grad=False)
        optimizer = chosen.make([parameter])
        parameter.grad = torch.zeros(2, 2)
        optimizer.step()
    except AllstepError:
        raise
    except Exception as error:
        raise UserError(
            f"set_optimizer: {chosen.cls.__name__} with {chosen.settings} cannot make a step:"
            f" {type(error).__name__}: {error}"
        ) from error
