"""The optimizer that workers name: a class that this process imports, and plain settings.

Nothing is pickled: a message has the class's module and name, and its settings as JSON. Only
subclasses of `torch.optim.Optimizer` are accepted. The folder of the workers' script is on the
search path during the import, since a script's own modules are there.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch.optim import Optimizer

from allstep.errors import UserError
from allstep.kvstore.updates.optimizer_class import OptimizerClass


def optimizer_text(chosen: OptimizerClass, folder: str) -> str:
    """Return what a worker sends. folder: that of its script."""
    cls = chosen.cls
    return json.dumps(
        [cls.__module__, cls.__qualname__, chosen.settings, chosen.has_master, folder]
    )


def imported_optimizer(text: str) -> OptimizerClass:
    """Return the optimizer that a worker has sent; UserError if its class is not found here."""
    module, name, settings, has_master, folder = json.loads(text)
    cls = _imported(module, name, folder)
    return OptimizerClass(cls, {key: _plain(value) for key, value in settings.items()}, has_master)


def _imported(module: str, name: str, folder: str) -> type[Optimizer]:
    if module == "__main__" or "<locals>" in name:
        raise UserError(
            f"set_optimizer: {name} is defined in the script itself, which servers do not run; move"
            " it to a module next to the script and import it from there"
        )
    try:
        with _search(folder):
            found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise UserError(
            f"set_optimizer: the server cannot import {module}.{name}"
            f" ({type(error).__name__}: {error}); install the module on the hosts of all servers"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UserError(
            f"set_optimizer: {module}.{name} is no torch optimizer on the server; expected a"
            " subclass of torch.optim.Optimizer"
        )
    return found


@contextmanager
def _search(folder: str) -> Iterator[None]:
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _plain(value: Any) -> Any:
    """Return a setting as it was before JSON, which has no tuples."""
    return tuple(map(_plain, value)) if isinstance(value, list) else value
