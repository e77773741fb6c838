"""From `sync=` of `DistributedOptimizer`, or ALLSTEP_SYNC, to an update of `parallel`.

```
allreduce      gradients are combined at every step
local:H        each rank steps alone; every H steps all take the mean of their weights
diloco:H       the same, with an outer Nesterov step on the difference to the last common weights
```

A script without `sync=` gets its mode from the environment variable ALLSTEP_SYNC. All ranks must
have the same mode, and make the same number of steps.
"""

import inspect
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from allstep.errors import ConfigError
from allstep.parallel.exchange import Named
from allstep.parallel.sync_mode import VARIABLE, SyncMode, sync_mode
from allstep.parallel.updates import Averaging
from allstep.parallel.updates.outer_step import outer_step
from allstep.torch.mpi_ops import Average

_AVAILABLE = "allreduce, local:H and diloco:H"


def requested_mode(sync: str | None) -> SyncMode:
    """Return the mode of an optimizer: `sync`, else ALLSTEP_SYNC, else allreduce."""
    text = os.environ.get(VARIABLE, "") or "allreduce" if sync is None else sync
    name = "sync" if sync is not None else VARIABLE
    try:
        mode = sync_mode(text, name)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if mode.from_epoch:
        raise ValueError(
            f"{name}={text}: an optimizer does not know the epochs of its script; use"
            f" local:{mode.number}"
        )
    if mode.name == "elastic":
        raise ValueError(
            f"{name}={text}: in elastic:H workers claim samples, which a script does not;"
            f" use local:{mode.number} here, or `allstep train sync={mode}`"
        )
    if mode.name not in ("allreduce", "local", "diloco"):
        raise ValueError(
            f"{name}={text}: not available in DistributedOptimizer yet; available: {_AVAILABLE}"
        )
    return mode


def averaging(
    optimizer: Optimizer,
    mode: SyncMode,
    op: int,
    share_weights: bool,
    named_parameters: Iterable[tuple[str, Parameter]] | None,
) -> Averaging | None:
    """Return the update of a mode that averages weights; None if it averages gradients.

    `named_parameters`: a generator of `nn.Module.named_parameters` that has not run yet names the
    module whose buffers and frozen parameters are averaged, too.
    """
    if not mode.averages_weights:
        return None
    if op != Average:
        raise ValueError(f"sync={mode} averages weights, not gradients: it needs op=hvd.Average")
    if share_weights:
        raise ValueError(
            f"share_weights and sync={mode} exclude each other: between two averages each rank has"
            " other weights; omit one of them"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"sync={mode} does not work with LBFGS; use sync=allreduce")
    outer = outer_step(optimizer, mode)
    module = _module_of(named_parameters)
    return Averaging(mode.number, outer, list if module is None else partial(_others, module))


def _module_of(named_parameters: Any) -> nn.Module | None:
    """Return the module whose `named_parameters()` this is."""
    if not inspect.isgenerator(named_parameters):
        return None
    found = inspect.getgeneratorlocals(named_parameters).get("self")
    return found if isinstance(found, nn.Module) else None


def _others(module: nn.Module) -> Sequence[Named]:
    """Return all parameters, and the buffers that have a mean."""
    buffers: list[Any] = [
        Named(f"buffer {name}", buffer)  # type: ignore[arg-type]
        for name, buffer in module.named_buffers()
        if (buffer.is_floating_point() or buffer.is_complex()) and 0 not in buffer.stride()
    ]
    return [*(Named(*each) for each in module.named_parameters()), *buffers]
