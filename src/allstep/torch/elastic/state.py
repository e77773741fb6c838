"""The elastic state of a torch training: models, optimizers and samplers are copied by handlers,
into memory that is allocated once (`saved_values`); other values are plain attributes.

`set_handler_registry` adds handlers for other types: a list of (type, handler class), of which the
first match is used.
"""

from typing import Any

import torch

from allstep.hvd.elastic import ObjectState
from allstep.hvd.place import rank
from allstep.torch.elastic.sampler import ElasticSampler
from allstep.torch.elastic.saved_values import SavedValues
from allstep.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class StateHandler:
    """Saves, restores and broadcasts one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the saved copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's value. A collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the value, and save the new one."""
        self.value = value
        self.save()


class _CopyOfState(StateHandler):
    """The handler of values with state_dict and load_state_dict."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved = SavedValues()
        self.save()

    def save(self) -> None:
        self._saved.save(self.value.state_dict())

    def restore(self) -> None:
        # With shared weights the ranks build a state dict together, and one of them may be lost.
        is_shared = getattr(self.value, "_shares_weights", False)
        present = {} if is_shared else self.value.state_dict()
        self.value.load_state_dict(self._saved.restored(present))


class ModelStateHandler(_CopyOfState):
    """The handler of a model's weights and buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_CopyOfState):
    """The handler of an optimizer's state and options."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_CopyOfState):
    """The handler of a sampler's progress."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class _Registry:
    """The table of handlers by type; users may replace it."""

    table: list[tuple[type, type[StateHandler]]] = [  # noqa: RUF012
        (torch.nn.Module, ModelStateHandler),
        (torch.optim.Optimizer, OptimizerStateHandler),
        (ElasticSampler, SamplerStateHandler),
    ]


_registry = _Registry()


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the table of handlers: (type, handler class), of which the first match is used."""
    return _registry.table


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the table; usually with `[(MyType, MyHandler), *get_handler_registry()]`."""
    _registry.table = registry


class TorchState(ObjectState):
    """The state of a torch training. Each argument becomes an attribute.

    `kwargs`: further values, such as a sampler, epoch and batch.
    """

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
        """Save all values."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the saved values."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's values. A collective."""
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
    """Return the handler class for a value; None for a plain attribute."""
    return next((handler for kind, handler in _registry.table if isinstance(value, kind)), None)
