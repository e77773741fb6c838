"""`DistributedOptimizer`: any torch optimizer, with the gradients of all ranks.

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    loss.backward()     # hooks record which gradients are available; between hosts, their
                        # reduction already starts
    optimizer.step()    # synchronize() replaces gradients by their mean over the ranks; then
                        # comes the wrapped optimizer's own step

The result is a new object of a new class: a subclass of the wrapped optimizer's class, with the
same name, whose `step` synchronizes first. It shares the parameter groups and the state of the
wrapped optimizer.

Gradients bypass the engine: a step needs no negotiation (see `allstep.parallel.exchange`). Only
sparse gradients, whose sizes differ between ranks, are gathered by name.

Beyond Horovod: numbers of samples behind a loss, steps in two phases, norms and clipping, one copy
of the weights per host; see `allstep.parallel.replicated`.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from allstep import faults
from allstep.comm.op.gradient_norms import values_of
from allstep.faults.injector import Injector
from allstep.hvd import use_order
from allstep.hvd.attached import keep_attached
from allstep.hvd.exceptions import HorovodInternalError, horovods_errors
from allstep.hvd.gradient_group import gradient_group, registered_number
from allstep.hvd.gradient_listener import TimelineListener
from allstep.hvd.place import running, size
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import REDUCTIONS
from allstep.parallel.exchange import Exchange, Named, Rule
from allstep.parallel.injected import begin_step
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import ReplicatedOptimizer, ratio_methods
from allstep.parallel.subclass import wrapped
from allstep.parallel.updates import ByOwners, Update
from allstep.torch.adasum_optimizer import make_adasum
from allstep.torch.compression import Compression
from allstep.torch.mpi_ops import (
    Adasum,
    Average,
    Sum,
    allreduce,
    sparse_allreduce_async,
)
from allstep.torch.optimizer_rules import by_owners, in_elastic_run, rule_for
from allstep.torch.parameter_names import check_names, split_groups
from allstep.torch.sync_rules import averaging, requested_mode

_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after"
    " optimizer.synchronize(): the gradients are reduced a second time. Use `with"
    " optimizer.skip_synchronize(): optimizer.step()`"
)
_TIMELINE = TimelineListener()


def DistributedOptimizer(  # noqa: N802
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    share_weights: bool = False,
    sync: str | None = None,
) -> Any:
    """Return an optimizer like `optimizer` whose `step` uses the gradients of all ranks.

    - `named_parameters`: names by which the ranks match their parameters. Default: match by order.
    - `compression`: the compressor for gradients while they are sent. Default: none.
    - `backward_passes_per_step`: backward passes whose gradients are added (not averaged) before a
      step. Default: 1.
    - `op`: Average (default), Sum, or Adasum, which combines the updates of the ranks by how
      parallel they are.
    - `gradient_predivide_factor`: the part of an average's division that happens before the sum,
      against overflow of small floats. Default: 1.0.
    - `num_groups`, `groups`: Horovod's options for which gradients are reduced together. They are
      checked and kept; here small gradients are always reduced together.
    - `sparse_as_dense`: reduce sparse gradients as dense ones; the results are sparse.
    - `process_set`: the ranks whose gradients are reduced. Default: all ranks.
    - `share_weights`: keep one copy of the weights for all ranks of a host; each rank updates a
      slice of them (see `parallel.updates`). Then only the optimizer may change weights. Not in an
      elastic run.
    - `sync`: "allreduce"; "local:H" or "diloco:H" average weights every H steps instead of
      gradients at each (docs/servers.md). Default: ALLSTEP_SYNC, else allreduce.
    """
    if isinstance(optimizer, Distributed):
        raise ValueError(
            f"{type(optimizer).__name__} is a distributed optimizer already: call"
            " hvd.DistributedOptimizer once"
        )
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor} needs op=hvd.Average"
        )
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    mode = requested_mode(sync)
    averages = averaging(optimizer, mode, op, share_weights, named_parameters)
    named = check_names(optimizer, named_parameters)
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: it must be above 0")
    if op == Adasum and size() > 1:
        return make_adasum(optimizer, named, compression, backward_passes_per_step, process_set)
    if op not in (*REDUCTIONS, Adasum):
        raise ValueError(f"op={op} is not a reduction: use hvd.Average, hvd.Sum or hvd.Adasum")
    shares = share_weights and (size() > 1 or in_elastic_run())
    update = by_owners(optimizer, op, compression) if shares else averages
    # Owners reduce gradients in their memory, so all gradients must be dense.
    rule = rule_for(op, compression, sparse_as_dense or shares)
    made = wrapped(optimizer, Distributed, **ratio_methods(optimizer, update))
    replicas = _replicas(made, named, process_set, rule, backward_passes_per_step, update)
    of_horovod = compression, op, gradient_predivide_factor, process_set
    made._attach(replicas, update, split_groups(named, groups), *of_horovod)
    if shares and update is not None:
        with horovods_errors():
            update.start(made)
    return made


def _replicas(
    made: "Distributed",
    named: list[Named],
    process_set: ProcessSet,
    rule: Rule,
    passes: int,
    update: Update | None,
) -> Replicas:
    """Return the description of the replicas; `passes`: backward passes per step."""
    # Which ranks get the gradients of shared weights is known when `step` or `synchronize` is
    # called, so they are not reduced during backward().
    overlap = None if update is None else False
    group = partial(gradient_group, process_set)
    # A reference to the optimizer would be a cycle, which only the garbage collector ends.
    weak: Any = weakref.ref(made)
    return Replicas(named, group, lambda: weak()._key_of_world(), rule, passes, _TIMELINE, overlap)


class Distributed(ReplicatedOptimizer):
    """The methods that are added to the wrapped class: Horovod's API.

    Attributes with Horovod's names are those that scripts are known to read.
    """

    def _attach(
        self,
        replicas: Replicas,
        update: Update | None,
        groups: Any,
        compression: Any,
        op: int,
        predivide: float,
        process_set: ProcessSet,
    ) -> None:
        self._attach_replicas(replicas, update)
        self._shares_weights = isinstance(update, ByOwners)
        self._groups = groups
        self._compression = compression
        self.op = op
        self.gradient_predivide_factor = predivide
        self.process_set = process_set
        self._should_synchronize = True
        keep_attached(self)

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes are added up before a step."""
        return self._replicas.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._replicas.passes = passes

    @property
    def _parameter_names(self) -> dict[Parameter, str]:
        return self._names

    # From init() to shutdown()

    def _attach_to_engine(self) -> None:
        """Use the engine that runs now.

        The group follows at the first reduction, in which all ranks participate.
        """
        self._steps = 0
        self._key: str | None = None
        is_needed = size() > 1 or in_elastic_run()
        self._reduces = bool(self.process_set.included()) and is_needed
        if self._reduces:
            if not self._requires_update:
                self._register_hooks()
            use_order.add(self, self.process_set.process_set_id)

    def _key_of_world(self) -> str:
        """Return the key of this optimizer in this world, the same on all ranks of its set."""
        if self._key is None:
            self._key = use_order.key_of(self, registered_number(self.process_set))
        return self._key

    def _detach_from_engine(self) -> None:
        """Drop the step in progress, if any, and the group; the engine closes next."""
        self._detach_replicas()

    # Reducing

    def synchronize(self) -> None:
        """Wait until the gradients are those of all ranks.

        `step` calls it. Call it before `step` to use the gradients in between, for example for
        clipping.
        """
        self._check_not_reduced("synchronize")
        if faults.active is not None:
            self._inject(faults.active)
        with horovods_errors():
            self._reduce_all()

    def reduce_gradients(self) -> None:
        """Do the first phase of a step; see `allstep.parallel.replicated`."""
        if faults.active is not None:
            self._inject(faults.active)
        with horovods_errors():
            super().reduce_gradients()

    def synchronize_weights(self) -> None:
        """Make the weights equal on all ranks; see `allstep.parallel.replicated`."""
        with horovods_errors():
            super().synchronize_weights()

    def _apply(self, closure: Callable[[], Any] | None = None) -> Any:
        if faults.active is not None:
            faults.active.update_begins()
        with horovods_errors():
            result = super()._apply(closure)
        if faults.active is not None:
            faults.active.step_ends()
        return result

    def _inject(self, injector: Injector) -> None:
        """Let the faults of this step occur; a no-op the second time in a step."""
        begin_step(injector, [each.parameter for each in self._replicas.named])

    def _begin_step(self) -> None:
        """Announce a step: ranks that have joined participate in it."""
        self._steps += 1
        running().notice(self._key_of_world(), self._steps)

    def _participate(self, number: int) -> None:
        """Contribute zeros to a step of the other ranks; called once this rank has joined."""
        self._steps = number
        if self._shares_weights:
            # A rank that has joined owns a slice that the others' step needs it to update.
            raise HorovodInternalError(
                "hvd.join() while other ranks still step an optimizer with share_weights=True is"
                " not supported: give every rank the same number of steps, or leave"
                " share_weights out"
            )
        with horovods_errors():
            self._replica_update.participate(self)

    def _reduce_with(self, exchange: Exchange) -> None:
        super()._reduce_with(exchange)
        if self._shares_weights:
            return
        for _, parameter in exchange.densified:
            assert parameter.grad is not None
            # The gradient was sparse before, and SparseAdam accepts only sparse gradients.
            parameter.grad = parameter.grad.to_sparse(1)

    def _reduce_sparse(self, sparse: Sequence[Named], exchange: Exchange) -> list[Tensor]:
        """Reduce the sparse gradients of these parameters by name, and return the results.

        Also measures our own gradients if norms are requested.
        """
        waiting = []
        for name, parameter in sparse:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter).to_sparse(1)
            elif not gradient.is_sparse:
                gradient = gradient.to_sparse(1)
            if exchange.own is not None:
                exchange.own.add(values_of(gradient))
            op = Average if self.op == Average else Sum
            finish = sparse_allreduce_async(gradient, name, op, process_set=self.process_set)
            waiting.append((parameter, finish))
        for parameter, finish in waiting:
            parameter.grad = finish()
        return [parameter.grad for _, parameter in sparse if parameter.grad is not None]

    # torch's own methods

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the wrapped optimizer's step on the gradients of all ranks.

        With a closure, each of its evaluations uses the gradients of all ranks.
        """
        self._check_not_reduced("step")
        if faults.active is not None:
            self._inject(faults.active)
        if self._shares_weights:
            return self._step_by_owners(closure)
        if self._should_synchronize and closure is not None:
            closure = self._synchronizing(closure)
        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(_TWICE, stacklevel=2)
            self.synchronize()
        return self._apply(closure)

    def _step_by_owners(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with horovods_errors():
            if self._should_synchronize and not self._synchronized:
                self._replica_update.reduce(self)
            else:
                self._replica_update.use_reduced(self)
        self._apply()
        return loss

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that also reduces the gradients."""

        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            # The steps of LBFGS depend on the loss, so all ranks must use the same loss.
            if isinstance(self, torch.optim.LBFGS):
                loss = allreduce(torch.as_tensor(loss).detach(), process_set=self.process_set)
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; raise AssertionError while they are being reduced."""
        if self._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step()"
                " or optimizer.synchronize(): the gradients that are being reduced would be lost"
            )
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch's `add_param_group` does.

        Without names of their own they are numbered as those of an optimizer without names.
        """
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        for number, parameter in enumerate(self.param_groups[group]["params"]):
            name = f"allreduce.noname.{group}.{number}"
            self._replicas.named.append(Named(name, parameter))
            if self._requires_update and parameter.requires_grad:
                self._watch(parameter)
        self._drop_exchange()

    # Horovod's own methods

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Skip the synchronization in `step` within the block.

        For gradients that were synchronized, and perhaps clipped, by the caller.
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True
