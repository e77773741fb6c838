"""The elastic state of a torch training: models, optimizers and samplers each by a handler that
knows how to copy them, the rest as plain attributes.

`set_handler_registry` adds handlers for other types: a list of (type, handler class), the first
that fits is taken.
"""

import copy
from typing import Any

import torch

from allstep.hvd.elastic import ObjectState
from allstep.hvd.place import rank
from allstep.torch.elastic.sampler import ElasticSampler
from allstep.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class StateHandler:
    """Saves, restores and spreads one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Another object takes the place; the copy is of that one."""
        self.value = value
        self.save()


class _CopyOfState(StateHandler):
    """For everything with state_dict and load_state_dict."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)


class ModelStateHandler(_CopyOfState):
    """Weights and buffers of a model."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_CopyOfState):
    """State and options of an optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_CopyOfState):
    """How far an epoch has come."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class _Registry:
    """Which handler is for which type; users may replace the table."""

    table: list[tuple[type, type[StateHandler]]] = [  # noqa: RUF012
        (torch.nn.Module, ModelStateHandler),
        (torch.optim.Optimizer, OptimizerStateHandler),
        (ElasticSampler, SamplerStateHandler),
    ]


_registry = _Registry()


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Which handler is for which type."""
    return _registry.table


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the table; usually `[(MyType, MyHandler), *get_handler_registry()]`."""
    _registry.table = registry


class TorchState(ObjectState):
    """The state of a torch training. Each argument becomes an attribute."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        self._handlers = {
            name: kind(value) for name, value in values.items() if (kind := _handler_for(value))
        }
        plain = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __getattr__(self, name: str) -> Any:
        handlers = self.__dict__.get("_handlers", {})
        if name not in handlers:
            raise AttributeError(
                f"this state has no {name!r}; it has {', '.join([*handlers, *self._saved_state])}"
            )
        return handlers[name].value

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        else:
            super().__setattr__(name, value)


def _handler_for(value: Any) -> type[StateHandler] | None:
    return next((handler for kind, handler in _registry.table if isinstance(value, kind)), None)
