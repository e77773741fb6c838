"""Replaces a model's batch norms by ghost or synchronized ones.

Weights, running statistics and hooks are kept.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from allstep.errors import ConfigError
from allstep.norm.among import Among
from allstep.norm.ghost import GhostBatchNorm, check_ghost
from allstep.norm.sync import SyncBatchNorm


def convert(
    model: nn.Module,
    *,
    ghost: int | None = None,
    sync: bool = False,
    across_workers: bool = False,
    process_group: Among = None,
) -> nn.Module:
    """Replace all batch norms of a model in place, and return the model.

    A model that is itself a batch norm is returned as a new one. Give one of:

    - `ghost`: statistics over this many samples, 32 for example (`GhostBatchNorm`). Where it does
      not divide a later batch, over about as many. With `across_workers`, the samples of several
      workers.
    - `sync=True`: statistics over the samples of all workers (`SyncBatchNorm`).

    `process_group` is a torch ProcessGroup or an hvd.ProcessSet of the workers (default: all).
    Optimizers that were created before remain valid, because parameters stay the same objects.
    """
    if (ghost is not None) == sync:
        raise ConfigError(
            f"convert: either ghost=<samples> or sync=True, not ghost={ghost} and sync={sync}"
        )
    if across_workers and sync:
        raise ConfigError(
            "convert: across_workers belongs to ghost=<samples>; sync=True is over all workers"
            " anyway"
        )
    if ghost is not None:
        check_ghost(ghost)
    made: dict[int, nn.Module] = {}
    for module in list(model.modules()):
        if isinstance(module, _BatchNorm):
            made[id(module)] = _converted(module, ghost, across_workers, process_group)
    if not made:
        raise ConfigError(
            f"convert: {type(model).__name__} has no batch norm; build it with one, or leave"
            " convert out"
        )
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    return made.get(id(model), model)


def _converted(
    old: _BatchNorm, ghost: int | None, across_workers: bool, process_group: Among
) -> _BatchNorm:
    if isinstance(old, nn.modules.lazy.LazyModuleMixin) and old.has_uninitialized_params():
        raise ConfigError(
            "convert: a lazy batch norm does not know its channels yet; send a batch through the"
            " model first"
        )
    new: _BatchNorm
    if ghost is None:
        new = SyncBatchNorm(old.num_features, process_group=process_group)
    else:
        new = GhostBatchNorm(
            old.num_features, ghost, across_workers=across_workers, process_group=process_group
        )
    own = {name: value for name, value in vars(new).items() if name in _OWN}
    # Parameters, buffers, hooks, eps, momentum, and training or evaluation mode.
    vars(new).update(vars(old))
    vars(new).update(own)
    return new


_OWN = {"ghost", "across_workers", "process_group", "looked"}
