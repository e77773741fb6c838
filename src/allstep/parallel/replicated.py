"""An optimizer whose gradients are those of all replicas.

    loss.backward()                # hooks record which gradients are available; between hosts,
                                   # their reduction already starts
    optimizer.reduce_gradients()   # wait: each rank has the mean gradients of what it will update
    optimizer.apply()              # update

`ReplicatedOptimizer` is the first base of a subclass of the wrapped optimizer's class. It holds an
exchange, which combines the gradients (`exchange`), and an update, which determines the ranks that
change the weights (`updates`): every rank all of them, or each rank those that it owns.

A step has two phases, so that waiting and updating can be timed separately, with norms and clipping
in between. With shared weights a rank updates only what it owns, so only these gradients are the
mean; otherwise all are. On one rank nothing is reduced, and the calls are the same.

**Samples.** `weight = n` before a backward gives the number of samples behind this rank's (mean)
loss; the result is then the mean over all samples of all ranks, however unevenly they are
distributed. A rank without samples sets 0.

**Norms.** `measure_norms = True`, before backward(), makes every reduction provide `norms`: squared
norms of each rank's own gradient and of the mean, which the noise scale needs. They are measured
during the reduction (`allstep.comm.op.gradient_norms`).

**Clipping.** `clip_norm = c`, before backward(), scales the mean gradient as
`torch.nn.utils.clip_grad_norm_` does, so that its norm is at most c; `norms.mean` is the square of
the norm before clipping. A norm that is not finite raises no error and changes nothing: check
`norms.mean`, and `discard()` the step.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from allstep.comm.op.gradient_norms import GradientNorms, Wanted, values_of
from allstep.errors import ConfigError, UserError
from allstep.parallel.exchange import AllReduce, Exchange, Named, Owners
from allstep.parallel.exchange.own_norms import alone, scale
from allstep.parallel.replicas import Replicas
from allstep.parallel.step_errors import NOT_REDUCED, REDUCED, SYNCHRONIZED, UNUSED
from allstep.parallel.subclass import wrapped
from allstep.parallel.traffic import Traffic
from allstep.parallel.updates import ByOwners, EveryRank, Update
from allstep.parallel.updates.trust_ratios import ratios_of_all


class ReplicatedOptimizer(Optimizer):
    """The methods that are added to the wrapped optimizer's class."""

    def _attach_replicas(self, replicas: Replicas, update: Update | None = None) -> None:
        self._replicas = replicas
        self._replica_update: Update = EveryRank() if update is None else update
        self._exchange: Exchange | None = None
        # Whether there are other ranks to reduce with.
        self._reduces = False
        # By `reduce_gradients` without an `apply` since; all gradients, without a step since.
        self._reduced = self._synchronized = False
        self._clip_norm: float | None = None
        self.traffic, self.measure_norms = Traffic(), False
        # Of the last reduction; None if it measured nothing.
        self.norms: GradientNorms | None = None
        self.weight: float | None = None
        # The weight of the last reduction.
        self._last_weight: float | None = None
        # Parameters whose gradients are complete; Horovod's name.
        self._handles: dict[Tensor, Any] = {}
        self._requires_update: set[Parameter] = set()
        # Backward passes until the gradient is complete.
        self._allreduce_delay: dict[Parameter, int] = {}
        self._warned = False

    @property
    def _names(self) -> dict[Parameter, str]:
        return {parameter: name for name, parameter in self._replicas.named}

    # During backward

    def _register_hooks(self) -> None:
        for _, parameter in self._replicas.named:
            if parameter.requires_grad:
                self._watch(parameter)

    def _watch(self, parameter: Parameter) -> None:
        """Count the backward passes of a parameter with a hook."""
        self._requires_update.add(parameter)
        self._allreduce_delay[parameter] = self._replicas.passes
        parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, parameter: Tensor) -> None:
        """Record that the gradient of a parameter has been accumulated; called by autograd."""
        assert isinstance(parameter, Parameter)
        assert parameter.grad is None or not parameter.grad.requires_grad, (
            f"the gradient of {self._names.get(parameter)} requires a gradient itself"
            " (create_graph=True): it cannot be reduced in place"
        )
        left = self._allreduce_delay[parameter] - 1
        if left < 0:
            raise AssertionError(
                f"gradients of {self._names.get(parameter)} were computed more than"
                " backward_passes_per_step times before the call to step(): raise"
                f" backward_passes_per_step (it is {self._replicas.passes}) to accumulate gradients"
                " locally"
            )
        self._allreduce_delay[parameter] = left
        if left == 0:
            self._handles[parameter] = None
            if self._exchange is not None:
                self._exchange.ready(parameter, self.weight, self._wanted())

    # The two phases of a step

    def reduce_gradients(self) -> None:
        """Do the first phase of a step: give each rank the mean gradients of what it updates.

        With shared weights that is a slice of them. `apply` or `discard` must follow. In between no
        rank may read shared weights: another rank may be changing them.
        """
        self._check_not_reduced("reduce_gradients")
        if self._synchronized:
            raise UserError(SYNCHRONIZED)
        self._replica_update.reduce(self)
        self._reduced = True

    def apply(self) -> None:
        """Do the second phase of a step: update the weights."""
        if not self._reduced:
            raise UserError(NOT_REDUCED)
        self._reduced = False
        # For torch's schedulers, which otherwise warn that there was no step.
        self._opt_called = True
        self._apply()

    def discard(self) -> None:
        """Drop the gradients instead of `apply`, on all ranks; the weights do not change."""
        if not self._reduced:
            raise UserError(NOT_REDUCED.replace("apply()", "discard()"))
        self._forget_reduced()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do both phases of a step. `closure`: computes the loss and its gradients, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        self.apply()
        return loss

    def synchronize_weights(self) -> None:
        """Make the weights equal on all ranks, which call it together.

        Needed only where ranks update weights of their own (`updates.averaging`), for example
        before an evaluation; a no-op elsewhere.
        """
        self._replica_update.synchronize(self)

    def _apply(self, closure: Callable[[], Any] | None = None) -> Any:
        self._synchronized = False
        return self._replica_update.apply(self, closure)

    def _own_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the step of the wrapped class."""
        return super().step(closure)

    def _check_not_reduced(self, name: str) -> None:
        if self._reduced:
            raise UserError(REDUCED.format(name))

    def _forget_reduced(self) -> None:
        self._reduced = self._synchronized = False

    @property
    def replica_update(self) -> Update:
        """Which rank changes which weights."""
        return self._replica_update

    @property
    def owners(self) -> Owners | None:
        """The exchange that knows the owners of weights; None if every rank updates all weights."""
        return self._replica_update.owners(self)

    # Reducing

    def _reduce_all(self) -> None:
        """Reduce all gradients on every rank."""
        combines = self._reduces and self._replica_update.reduces_gradients(self)
        if combines and self._requires_update:
            self._begin_step()
            self._reduce_with(self._all_reduce())
        else:
            parameters = [each.parameter for each in self._replicas.named]
            self._measure_alone([p.grad for p in parameters if p.grad is not None])
        self._end_of_pass()
        self._synchronized = True

    def _begin_step(self) -> None:
        """Called before each reduction, on all ranks that have not left."""

    def _participate_in_reduction(self) -> None:
        """Contribute nothing to a reduction of all gradients by the other ranks."""
        exchange = self._all_reduce()
        exchange.reduce(self.weight, absent=True, wanted=self._wanted())
        exchange.norms()

    def _all_reduce(self) -> Exchange:
        if self._exchange is None:
            each = self._replicas
            key = f"{each.key()}/{len(self.param_groups)}"
            group = self._replica_update.gradient_group(self)
            how = each.rule, each.overlap, each.listener, each.bucket
            self._exchange = AllReduce(group, key, each.named, *how)
        return self._exchange

    def _reduce_with(self, exchange: Exchange) -> None:
        sparse = exchange.reduce(self.weight, wanted=self._wanted())
        self.traffic.count([each.parameter for each in exchange.named], exchange.used)
        self._measure(exchange, self._reduce_sparse(sparse, exchange))
        if not exchange.used and not sparse and not self._warned:
            self._warned = True
            warnings.warn(UNUSED.format(len(self._replicas.named)), stacklevel=5)

    def _reduce_sparse(self, sparse: Sequence[Named], exchange: Exchange) -> list[Tensor]:
        """Reduce gradients that are sparse on some rank, and return the results."""
        if sparse:
            raise UserError(
                f"the gradient of {sparse[0].name} is sparse: make it dense (Rule.densify)"
            )
        return []

    def _end_of_pass(self) -> None:
        """Reset the state of the backward passes after a reduction."""
        self._handles.clear()
        self._last_weight, self.weight = self.weight, None
        self._reset_delays()

    def _reset_delays(self) -> None:
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = self._replicas.passes

    def _drop_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _detach_replicas(self) -> None:
        """Drop the step in progress, if any, and the resources of the groups, which close next."""
        self._replica_update.detach(self)
        for parameter, left in self._allreduce_delay.items():
            if left < self._replicas.passes:
                # The gradient may be half reduced.
                parameter.grad = None
        self._end_of_pass()
        self._forget_reduced()
        self._drop_exchange()

    def close(self) -> None:
        """Drop a step in progress; shared weights and state become this rank's own."""
        self._detach_replicas()

    def attach(self, key: str, size: int) -> None:
        """Drop a step in progress; reduce with the `size` ranks of another world, by `key`."""
        self._detach_replicas()
        self._replicas.key, self._reduces = lambda: key, size > 1
        if self._reduces and not self._requires_update:
            self._register_hooks()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes make a step; passes counted so far are forgotten."""
        self._replicas.passes = passes
        self._reset_delays()

    # Norms and clipping

    @property
    def clip_norm(self) -> float | None:
        """The maximum norm of the mean gradient; None for no limit."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, limit: float | None) -> None:
        if limit is not None and not 0 < limit < math.inf:
            raise ConfigError(
                f"clip_norm={limit}: it must be above 0 and finite, or None for no clipping"
            )
        self._clip_norm = limit

    def _wanted(self) -> Wanted:
        return Wanted(
            own=self.measure_norms, mean=self.measure_norms or self._clip_norm is not None
        )

    def _take_norms(self, norms: GradientNorms | None) -> float:
        """Store the norms; return the factor for the gradients as in torch, 1 for no clipping."""
        self.norms = norms
        if norms is None or self._clip_norm is None or not math.isfinite(norms.mean):
            return 1.0
        return min(1.0, self._clip_norm / (math.sqrt(norms.mean) + 1e-6))

    def _measure(self, exchange: Exchange, sparse: list[Tensor]) -> None:
        """Compute norms and clip after a reduction.

        `sparse`: the reduced gradients that are sparse.
        """
        if exchange.mean is not None:
            for each in sparse:
                exchange.mean.add(values_of(each), 1 / exchange.present)
        factor = self._take_norms(exchange.norms())
        if factor < 1.0:
            exchange.scale_by(factor)
            scale(sparse, factor)

    def _measure_alone(self, gradients: list[Tensor]) -> None:
        """Compute norms and clip in a world of one rank."""
        wanted = self._wanted()
        norms = alone(gradients, self.weight, wanted) if wanted.mean else None
        factor = self._take_norms(norms)
        if factor < 1.0:
            scale(gradients, factor)

    # The optimizer's state

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of all parameters; any rank may call it alone."""
        with self._replica_update.state_filled(self):
            return super().state_dict()

    def gather_state(self) -> None:
        """Let `state_dict` of rank 0 return the state of all ranks, until the next step.

        All ranks call it together, where each rank has state of its own (`updates.averaging`); a
        no-op elsewhere.
        """
        self._replica_update.gather_state(self)

    @property
    def state_is_per_rank(self) -> bool:
        """Whether each rank has state of its own, so that a checkpoint needs `gather_state`."""
        return self._reduces and self._replica_update.state_is_per_rank

    def whole_state(self) -> AbstractContextManager[None]:
        """Give `state` the values of whole parameters within the block, and keep changes to them.

        All ranks use it together.
        """
        return self._replica_update.state_changed(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, written by any number of ranks. All ranks load it together."""
        self._handles.clear()
        self._forget_reduced()
        self._reset_delays()
        super().load_state_dict(state_dict)
        self._replica_update.take_state(self)


def replicate(
    optimizer: Optimizer, replicas: Replicas, size: int, update: Update | None = None
) -> ReplicatedOptimizer:
    """Return an optimizer like `optimizer` that updates with the gradients of all `size` ranks.

    All ranks call it together. `replicas`: parameters, process group and reduction. `update`: which
    rank changes which weights; None: each rank all of its own. With `ByOwners` only the optimizer
    may change weights.
    """
    made: ReplicatedOptimizer = wrapped(
        optimizer, ReplicatedOptimizer, **ratio_methods(optimizer, update)
    )
    made._attach_replicas(replicas, update)
    made._reduces = size > 1
    if made._reduces:
        made._register_hooks()
        if update is not None:
            update.start(made)
    return made


def ratio_methods(optimizer: Optimizer, update: Update | None) -> dict[str, Any]:
    """Return the methods by which `trust_ratios` includes the layers that other ranks update."""
    return (
        {"trust_ratios": _trust_ratios}
        if isinstance(update, ByOwners) and hasattr(optimizer, "trust_ratios")
        else {}
    )


def _trust_ratios(self: ReplicatedOptimizer) -> dict[str | int, float]:
    """Return the factor by which the last step scaled each layer, by name, or number without names.

    Exempt layers have none. All ranks call it together; rank 0 gets the ratios of all layers, the
    others an empty dict.
    """
    # The wrapped class has the method.
    own = super(ReplicatedOptimizer, self).trust_ratios()  # type: ignore[misc]
    return ratios_of_all(self._replicas.group(), own)
