"""An optimizer whose gradients are those of all replicas.

    loss.backward()                  # hooks note which gradients are there; between hosts they
    already travel optimizer.reduce_gradients()     # wait: each rank has the mean gradients of what
    it will update optimizer.apply()                # update

`ReplicatedOptimizer` stands in front of the wrapped optimizer's own class. It holds an exchange,
which brings the gradients together (`exchange`), and an update, which says who changes the weights
(`updates`): every rank all of them, or each rank what it owns.

A step has two parts, so that waiting and updating can be timed apart, and norms and clipping have
their place between them. With shared weights a rank updates only what it owns, so only these
gradients are the mean; without it all are. On one rank nothing is reduced, and the calls are the
same.

**Samples.** `weight = n` before a backward says how many samples are behind this rank's (mean)
loss; the result is then the mean over all samples of all ranks, however unevenly they are spread. A
rank without samples sets 0.

**Norms.** `measure_norms = True`, before backward(), makes every reduction deliver `norms`: squared
norms of each rank's own gradient and of the mean, which is what the noise scale needs. They are
taken as the gradients pass by (`allstep.comm.op.norms`).

**Clipping.** `clip_norm = c`, before backward(), scales the mean gradient as
`torch.nn.utils.clip_grad_norm_` does, so that its norm is at most c; `norms.mean` has the square of
what it was before. A norm that is not finite is no error here and changes nothing: look at
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

from allstep.comm.op.norms import GradientNorms, Squares, Wanted, values_of
from allstep.errors import ConfigError, UserError
from allstep.parallel.exchange import AllReduce, Exchange, Named, Owners
from allstep.parallel.replicas import Replicas
from allstep.parallel.subclass import wrapped
from allstep.parallel.updates import ByOwners, EveryRank, Update
from allstep.parallel.updates.trust_ratios import ratios_of_all

_REDUCED = (
    "optimizer.{}() after optimizer.reduce_gradients(): the gradients are those of all ranks"
    " already. Call optimizer.apply() to use them, or optimizer.discard() to leave them"
)
_SYNCHRONIZED = (
    "optimizer.reduce_gradients() after optimizer.synchronize(), which has reduced them. Use one of"
    " the two: a step is `reduce_gradients(); apply()`, or `synchronize()` and `with"
    " optimizer.skip_synchronize(): step()`"
)
_NOT_REDUCED = (
    "optimizer.apply(): there are no reduced gradients. Call optimizer.reduce_gradients() after"
    " backward(), before each apply()"
)
_UNUSED = (
    "none of this optimizer's {} parameters has a gradient, on any rank: step() changes nothing."
    " Was the model given other parameters (load_state_dict(assign=True)) after the optimizer was"
    " made? Then make the optimizer anew"
)


class ReplicatedOptimizer(Optimizer):
    """What is added to the wrapped class."""

    def _attach_replicas(self, replicas: Replicas, update: Update | None = None) -> None:
        self._replicas = replicas
        self._replica_update: Update = EveryRank() if update is None else update
        self._exchange: Exchange | None = None
        self._reduces = False  # whether there are other ranks to reduce with
        self._reduced = False  # by `reduce_gradients`, and `apply` has not come yet
        self._synchronized = False  # all gradients are reduced, and no step has come yet
        self._clip_norm: float | None = None
        self.measure_norms = False
        self.norms: GradientNorms | None = (
            None  # of the last reduction; None if it measured nothing
        )
        self.weight: float | None = None
        self._handles: dict[
            Tensor, Any
        ] = {}  # parameters whose gradients are complete; Horovod's name
        self._requires_update: set[Parameter] = set()
        self._allreduce_delay: dict[
            Parameter, int
        ] = {}  # backward passes until the gradient is complete
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
        self._requires_update.add(parameter)
        self._allreduce_delay[parameter] = self._replicas.passes
        parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, parameter: Tensor) -> None:
        """The gradient of a parameter has been accumulated."""
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

    # The two parts of a step

    def reduce_gradients(self) -> None:
        """The first part of a step: each rank gets the mean gradients of what it updates, which
        with shared weights is a part of them.

        `apply` must follow, or `discard`. Between them no rank may read weights that are shared:
        another rank may be changing them.
        """
        self._check_not_reduced("reduce_gradients")
        if self._synchronized:
            raise UserError(_SYNCHRONIZED)
        self._replica_update.reduce(self)
        self._reduced = True

    def apply(self) -> None:
        """The second part of a step: the update alone."""
        if not self._reduced:
            raise UserError(_NOT_REDUCED)
        self._reduced = False
        self._opt_called = (
            True  # for torch's schedulers, which otherwise warn that there was no step
        )
        self._apply()

    def discard(self) -> None:
        """Instead of `apply`, on all ranks: the gradients are not used, the weights stay as they
        are."""
        if not self._reduced:
            raise UserError(_NOT_REDUCED.replace("apply()", "discard()"))
        self._forget_reduced()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Both parts of a step. closure: computes the loss and its gradients, once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_gradients()
        self.apply()
        return loss

    def _apply(self, closure: Callable[[], Any] | None = None) -> Any:
        self._synchronized = False
        return self._replica_update.apply(self, closure)

    def _own_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step of the wrapped class."""
        return super().step(closure)

    def _check_not_reduced(self, name: str) -> None:
        if self._reduced:
            raise UserError(_REDUCED.format(name))

    def _forget_reduced(self) -> None:
        self._reduced = self._synchronized = False

    @property
    def owners(self) -> Owners | None:
        """Who updates what; None where every rank updates all."""
        return self._replica_update.owners(self)

    # Reducing

    def _reduce_all(self) -> None:
        """Every rank gets every gradient."""
        if self._reduces and self._requires_update:
            self._begin_step()
            self._reduce_with(self._all_reduce())
        else:
            parameters = [each.parameter for each in self._replicas.named]
            self._measure_alone([p.grad for p in parameters if p.grad is not None])
        self._end_of_pass()
        self._synchronized = True

    def _begin_step(self) -> None:
        """Called before each reduction, on all ranks that have not left."""

    def _all_reduce(self) -> Exchange:
        if self._exchange is None:
            each = self._replicas
            key = f"{each.key}/{len(self.param_groups)}"
            self._exchange = AllReduce(
                each.group(), key, each.named, each.rule, each.overlap, each.listener
            )
        return self._exchange

    def _reduce_with(self, exchange: Exchange) -> None:
        sparse = exchange.reduce(self.weight, wanted=self._wanted())
        self._measure(exchange, self._reduce_sparse(sparse, exchange))
        if not exchange.used and not sparse and not self._warned:
            self._warned = True
            warnings.warn(_UNUSED.format(len(self._replicas.named)), stacklevel=5)

    def _reduce_sparse(self, sparse: Sequence[Named], exchange: Exchange) -> list[Tensor]:
        """Reduce gradients that are sparse on some rank; return what comes out."""
        if sparse:
            raise UserError(
                f"the gradient of {sparse[0].name} is sparse: make it dense (Rule.densify)"
            )
        return []

    def _end_of_pass(self) -> None:
        self._handles.clear()
        self.weight = None
        self._reset_delays()

    def _reset_delays(self) -> None:
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = self._replicas.passes

    def _drop_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _detach_replicas(self) -> None:
        """The groups close: drop the step that is under way, if any, and what belongs to them."""
        self._replica_update.detach(self)
        for parameter, left in self._allreduce_delay.items():
            if left < self._replicas.passes:
                parameter.grad = None  # perhaps half reduced
        self._end_of_pass()
        self._forget_reduced()
        self._drop_exchange()

    def close(self) -> None:
        """Drop a step that is under way; weights and state that were shared become this rank's own."""
        self._detach_replicas()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on; passes that have been counted for the next step are forgotten."""
        self._replicas.passes = passes
        self._reset_delays()

    # Norms and clipping

    @property
    def clip_norm(self) -> float | None:
        """What the norm of the mean gradient may be at most; None for no limit."""
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
        """Keep them.

        Returns the factor by which to scale the gradients, as torch has it; 1 for none.
        """
        self.norms = norms
        if norms is None or self._clip_norm is None or not math.isfinite(norms.mean):
            return 1.0
        return min(1.0, self._clip_norm / (math.sqrt(norms.mean) + 1e-6))

    def _measure(self, exchange: Exchange, sparse: list[Tensor]) -> None:
        """After a reduction: the norms, and the clipping. sparse: the reduced gradients that are
        sparse."""
        if exchange.mean is not None:
            for each in sparse:
                exchange.mean.add(values_of(each), 1 / exchange.present)
        factor = self._take_norms(exchange.norms())
        if factor < 1.0:
            exchange.scale_by(factor)
            _scale(sparse, factor)

    def _measure_alone(self, gradients: list[Tensor]) -> None:
        """The same where there are no other ranks."""
        wanted = self._wanted()
        norms = alone(gradients, self.weight, wanted) if wanted.mean else None
        factor = self._take_norms(norms)
        if factor < 1.0:
            _scale(gradients, factor)

    # The optimizer's state

    def state_dict(self) -> dict[str, Any]:
        """The whole state, of all parameters, from any rank alone."""
        with self._replica_update.state_filled(self):
            return super().state_dict()

    def whole_state(self) -> AbstractContextManager[None]:
        """Within it `state` is that of whole parameters, and what is changed there counts
        afterwards. All ranks together."""
        return self._replica_update.state_changed(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A whole state, written by any number of ranks. All ranks load it together."""
        self._handles.clear()
        self._forget_reduced()
        self._reset_delays()
        super().load_state_dict(state_dict)
        self._replica_update.take_state(self)


def replicate(
    optimizer: Optimizer, replicas: Replicas, size: int, *, share_weights: bool = False
) -> ReplicatedOptimizer:
    """Return an optimizer like `optimizer` that updates with the gradients of all `size` ranks,
    which make it together.

    share_weights: one copy of the weights for all ranks of a host, each rank updates a part.
    Weights may then be changed by the optimizer only.
    """
    update = ByOwners(type(optimizer)) if share_weights and size > 1 else None
    made: ReplicatedOptimizer = wrapped(
        optimizer, ReplicatedOptimizer, **ratio_methods(optimizer, update)
    )
    made._attach_replicas(replicas, update)
    made._reduces = size > 1
    if made._reduces:
        made._register_hooks()
    if update is not None:
        update.sharing(made)
    return made


def ratio_methods(optimizer: Optimizer, update: Update | None) -> dict[str, Any]:
    """What a class must have so that `trust_ratios` tells of the layers that other ranks have
    updated."""
    return (
        {"trust_ratios": _trust_ratios}
        if update is not None and hasattr(optimizer, "trust_ratios")
        else {}
    )


def _trust_ratios(self: ReplicatedOptimizer) -> dict[str | int, float]:
    """By which factor the last step scaled each layer: {name, or number without names: factor}.
    Exempt layers have none.

    All ranks call it together; rank 0 gets the ratios of all layers, the others an empty dict.
    """
    own = super(ReplicatedOptimizer, self).trust_ratios()  # type: ignore[misc]  # the wrapped class has it
    return ratios_of_all(self._replicas.group(), own)


def alone(gradients: list[Tensor], weight: float | None, wanted: Wanted) -> GradientNorms:
    """The norms in a world of one rank, whose own gradient is the mean."""
    squares = Squares()
    for gradient in gradients:
        squares.add(values_of(gradient))
    total = squares.total()
    return GradientNorms(
        (total,) if wanted.own else (), (1.0 if weight is None else float(weight),), total
    )


def _scale(gradients: list[Tensor], factor: float) -> None:
    for gradient in gradients:
        gradient.mul_(factor)  # not of detach(): a sparse one would keep its values
