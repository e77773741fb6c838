"""Training as with `sync=async`: each rank pushes its gradients to weights that all ranks share.

There is one long round, from which each step takes a claim; a claim counts as one sample, and the
bench has images of its own. The ranks compute with different versions of the weights, so their
losses are not those of the other contenders.
"""

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from allstep.comm.group.init import group_for
from allstep.errors import AllstepError
from allstep.kvstore.training import Options, SharedModel, share_model
from allstep.parallel.exchange import Named, Rule
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import ReplicatedOptimizer, replicate
from allstep.parallel.sync_mode import sync_mode

_MOST_STEPS = 16_000


class Pusher(Optimizer):
    """An optimizer whose step is a push of the own gradient, and a claim for the next step."""

    # Everything that a step uses is that of `made`; the base class is for its type only.
    def __init__(self, made: ReplicatedOptimizer, shared: SharedModel) -> None:
        self._made, self._shared = made, shared
        self._claim()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients."""
        self._made.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Push the gradients; the parameters are the newest weights afterwards."""
        self._made.reduce_gradients()
        self._made.apply()
        self._claim()

    def _claim(self) -> None:
        claim = self._shared.claims.next()
        if claim is None:
            raise AllstepError(f"more than {_MOST_STEPS} steps; measure fewer repetitions")
        self._shared.begin(claim)


def push_gradients(model: nn.Module, sgd: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Share the weights of `model` with the other ranks. A collective."""
    parameters = [Named(name, each) for name, each in model.named_parameters()]
    replicas = Replicas(parameters, lambda: group_for("gradients"), lambda: "bench", Rule())
    made = replicate(sgd, replicas, 1)
    shared = share_model(made, type(sgd), Options(sync_mode("async"), _MOST_STEPS))
    shared.begin_round(0, _MOST_STEPS, dist.get_world_size())
    return model, Pusher(made, shared)
