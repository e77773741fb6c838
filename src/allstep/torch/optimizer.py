"""`DistributedOptimizer`: any torch optimizer, with the gradients of all ranks.

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    loss.backward()            # hooks note which gradients are there; between hosts they already travel
    optimizer.step()           # synchronize(): gradients become their mean over the ranks; then the wrapped optimizer's own step

What comes back is a new object of a new class: a subclass of the wrapped optimizer's, with the same name, whose `step` synchronises first.
It shares the parameter groups and the state of the wrapped one.

The gradients do not go through the engine: nothing is negotiated in a step (see `allstep.parallel.gradients`). Only sparse gradients,
whose sizes differ from rank to rank, are gathered by name.

Beyond Horovod: `optimizer.weight = n` before a backward says how many samples are behind this rank's (mean) loss; the result is then the
mean over all samples of all ranks, however unevenly they are spread. A rank without samples sets 0. A step can be taken in two parts,
with norms and clipping: see `two_parts`.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp
from torch.nn import Parameter
from torch.optim import Optimizer

from allstep.comm.op.norms import values_of
from allstep.errors import CommError
from allstep.hvd.attached import keep_attached
from allstep.hvd.exceptions import HorovodInternalError
from allstep.hvd.place import running, size
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.reported_gradients import ReportedGradients
from allstep.parallel.gradients import Gradients, Named, Rule
from allstep.parallel.subclass import wrapped
from allstep.parallel.two_part_step import TwoParts
from allstep.torch.adasum_optimizer import make_adasum
from allstep.torch.compression import Compression
from allstep.torch.gradient_group import gradient_group
from allstep.torch.mpi_ops import Adasum, Average, Max, Min, Product, Sum, allreduce, sparse_allreduce_async
from allstep.torch.parameter_names import check_names, split_groups

_KINDS = {Average: ReduceOp.SUM, Sum: ReduceOp.SUM, Min: ReduceOp.MIN, Max: ReduceOp.MAX, Product: ReduceOp.PRODUCT}
_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): the gradients are reduced a "
    "second time. Use `with optimizer.skip_synchronize(): optimizer.step()`"
)
_UNUSED = (
    "none of this optimizer's {} parameters has a gradient, on any rank: step() changes nothing. Was the model given other parameters "
    "(load_state_dict(assign=True)) after the optimizer was made? Then make the optimizer anew"
)
_made = 0  # optimizers of this process: their number tells them apart on all ranks


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
) -> Any:
    """An optimizer like `optimizer` whose `step` uses the gradients of all ranks.

    named_parameters: names by which ranks match their parameters; without them their order counts.
    compression: what gradients are turned into while they travel.
    backward_passes_per_step: how many backward passes add up before a step; their sum counts, not their mean.
    op: Average, Sum, or Adasum, which combines the updates of ranks by how much they point the same way.
    gradient_predivide_factor: part of the division of an average that is done before adding, against overflow of small floats.
    num_groups, groups: Horovod's ways to say what travels together. Checked and kept; here small gradients always travel together.
    sparse_as_dense: reduce sparse gradients as dense ones; they come back sparse.
    process_set: the ranks whose gradients count.
    share_weights: one copy of the weights for all ranks of a host, each rank updates a part (see `shared_weights`). Weights may then
        be changed by the optimizer only.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=hvd.Average")
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    named = check_names(optimizer, named_parameters)
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: it must be above 0")
    if op == Adasum and size() > 1:
        return make_adasum(optimizer, named, compression, backward_passes_per_step, process_set)
    if op not in (*_KINDS, Adasum):
        raise ValueError(f"op={op} is no reduction: use hvd.Average, hvd.Sum or hvd.Adasum")
    added: type = Distributed
    if share_weights and size() > 1:
        added = _shared_weights(optimizer, op, compression)
    made = wrapped(optimizer, added)
    made._attach(
        named,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
    )
    return made


def _shared_weights(optimizer: Optimizer, op: int, compression: Any) -> type:
    if op not in (Average, Sum) or compression is not Compression.none:
        raise ValueError(
            "share_weights works with op=hvd.Average or hvd.Sum and without compression: nothing else is added where it lies"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("share_weights does not work with LBFGS, which moves all parameters as one")
    from allstep.parallel.shared_trust_ratios import SharedRatios
    from allstep.parallel.shared_weights import SharedWeights

    return SharedRatios if hasattr(optimizer, "trust_ratios") else SharedWeights


@contextmanager
def horovods_errors() -> Iterator[None]:
    """What goes wrong between ranks within it is raised as Horovod's error."""
    try:
        yield
    except CommError as error:
        raise HorovodInternalError(str(error)) from error


class Distributed(TwoParts):
    """What is added to the wrapped class. Attributes with Horovod's names are those that scripts are known to look at."""

    _overlap: bool | None = None  # whether gradients travel during backward(); None: as `Gradients` finds it best

    def _attach(
        self,
        named: list[Named],
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        predivide: float,
        groups: int | Sequence[Sequence[Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        global _made
        self._attach_parts()
        self._number, _made = _made, _made + 1
        self._named = named
        self._parameter_names = {parameter: name for name, parameter in named}
        self._groups = split_groups(named, groups)
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.gradient_predivide_factor = predivide
        self.process_set = process_set
        self.weight: float | None = None
        self._handles: dict[Tensor, Any] = {}
        self._should_synchronize = True
        self._warned = False
        self._requires_update: set[Parameter] = set()
        self._gradients: Gradients | None = None
        self._allreduce_delay: dict[Parameter, int] = {}
        keep_attached(self)

    # From init() to shutdown()

    def _attach_to_engine(self) -> None:
        """Belong to the engine that runs now. The group follows at the first reduction, where all ranks come together."""
        self._steps = 0
        is_elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        self._reduces = bool(self.process_set.included()) and (size() > 1 or is_elastic)
        if self._reduces:
            if not self._requires_update:
                self._register_hooks()
            running().on_notice(self._key, self._take_part)

    def _detach_from_engine(self) -> None:
        """The engine closes: drop the step that is under way, if any, and the group."""
        for parameter, left in self._allreduce_delay.items():
            if left < self.backward_passes_per_step:
                parameter.grad = None  # perhaps half reduced
        self._end_of_pass()
        self._forget_reduced()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        gradients, self._gradients = self._gradients, None
        if gradients is not None:
            gradients.close()

    # During backward

    def _register_hooks(self) -> None:
        for _, parameter in self._named:
            if parameter.requires_grad:
                self._watch(parameter)

    def _watch(self, parameter: Parameter) -> None:
        self._requires_update.add(parameter)
        self._allreduce_delay[parameter] = self.backward_passes_per_step
        parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, parameter: Tensor) -> None:
        """The gradient of a parameter has been accumulated."""
        assert isinstance(parameter, Parameter)
        assert parameter.grad is None or not parameter.grad.requires_grad, (
            f"the gradient of {self._parameter_names.get(parameter)} requires a gradient itself (create_graph=True): it cannot be "
            "reduced in place"
        )
        left = self._allreduce_delay[parameter] - 1
        if left < 0:
            raise AssertionError(
                f"gradients of {self._parameter_names.get(parameter)} were computed more than backward_passes_per_step times before the "
                f"call to step(): raise backward_passes_per_step (it is {self.backward_passes_per_step}) to accumulate gradients locally"
            )
        self._allreduce_delay[parameter] = left
        if left == 0:
            self._handles[parameter] = None
            if self._gradients is not None:
                self._gradients.ready(parameter, self.weight, self._wanted())

    # Reducing

    def synchronize(self) -> None:
        """Wait until the gradients are those of all ranks. `step` calls it; call it yourself to look at them before (clipping)."""
        self._check_not_reduced("synchronize")
        if self._reduces and self._requires_update:
            self._announce()
            self._reduce()
        else:
            self._measure_alone([p.grad for _, p in self._named if p.grad is not None], self.weight)
        self._end_of_pass()
        self._synchronized = True

    def _announce(self) -> None:
        """Tell that a step begins: ranks that have joined take part in it."""
        self._steps += 1
        with horovods_errors():
            running().notice(self._key, self._steps)

    def _end_of_pass(self) -> None:
        self._handles.clear()
        self.weight = None
        self._reset_delays()

    def _reduce(self, absent: bool = False) -> None:
        with horovods_errors():
            if self._gradients is None:
                group = gradient_group(self.process_set)
                key = f"{self._key}/{len(self.param_groups)}"
                self._gradients = ReportedGradients(group, key, self._named, self._rule(), self._overlap)
            sparse = self._gradients.reduce(self.weight, absent, self._wanted())
            if absent:
                self._gradients.norms()
                return
            self._measure(self._gradients, self._reduce_sparse(sparse, self._gradients))
            for _, parameter in self._gradients.densified:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.to_sparse(1)  # it came in sparse, and SparseAdam takes nothing else
            self._warn_if_unused(self._gradients, sparse)

    @property
    def _key(self) -> str:
        """The same on all ranks: optimizers are told apart by the order in which they were made."""
        return f"optimizer/{self._number}"

    def _rule(self) -> Rule:
        compressed = self._compression is not Compression.none
        return Rule(
            kind=_KINDS[self.op],
            mean=self.op == Average,
            compress=self._compression.compress if compressed else None,
            decompress=self._compression.decompress if compressed else None,
            densify=self._sparse_as_dense,
        )

    def _take_part(self, number: int) -> None:
        """This rank has joined; the others take a step."""
        self._steps = number
        self._reduce(absent=True)

    def _reduce_sparse(self, sparse: list[Named], gradients: Gradients) -> list[Tensor]:
        """Of these parameters, by name. Returns what comes out; our own are measured on the way."""
        waiting = []
        for name, parameter in sparse:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter).to_sparse(1)
            elif not gradient.is_sparse:
                gradient = gradient.to_sparse(1)
            if gradients.own is not None:
                gradients.own.add(values_of(gradient))
            op = Average if self.op == Average else Sum
            waiting.append((parameter, sparse_allreduce_async(gradient, name, op, process_set=self.process_set)))
        for parameter, finish in waiting:
            parameter.grad = finish()
        return [parameter.grad for _, parameter in sparse if parameter.grad is not None]

    def _warn_if_unused(self, gradients: Gradients, sparse: list[Named]) -> None:
        if not gradients.used and not sparse and not self._warned:
            self._warned = True
            warnings.warn(_UNUSED.format(len(self._named)), stacklevel=4)

    def _reset_delays(self) -> None:
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = self.backward_passes_per_step

    # The parts of a step

    def _reduce_what_we_update(self) -> None:
        self.synchronize()

    def _apply(self, closure: Callable[[], Any] | None = None) -> Any:
        self._synchronized = False
        return super().step(closure)

    # torch's own methods

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step, on the gradients of all ranks: with a closure, on those of each of its evaluations."""
        self._check_not_reduced("step")
        if self._should_synchronize and closure is not None:
            closure = self._synchronizing(closure)
        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(_TWICE, stacklevel=2)
            self.synchronize()
        return self._apply(closure)

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            if isinstance(self, torch.optim.LBFGS):  # its steps depend on the loss, so that has to be everybody's
                loss = allreduce(torch.as_tensor(loss).detach(), process_set=self.process_set)
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(): "
                "the gradients that are being reduced would be lost"
            )
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Further parameters. Without names of their own they are numbered as those of an optimizer without names."""
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        for number, parameter in enumerate(self.param_groups[group]["params"]):
            name = f"allreduce.noname.{group}.{number}"
            self._named.append(Named(name, parameter))
            self._parameter_names[parameter] = name
            if self._requires_update and parameter.requires_grad:
                self._watch(parameter)
        self._drop_gradients()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._handles.clear()
        self._forget_reduced()
        self._reset_delays()
        super().load_state_dict(state_dict)

    # Horovod's

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it `step` does not synchronise: for gradients that were synchronised, and perhaps clipped, by hand."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on; passes that have been counted for the next step are forgotten."""
        self.backward_passes_per_step = passes
        self._reset_delays()
