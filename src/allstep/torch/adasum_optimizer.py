"""The optimizer of `op=Adasum`: ranks combine their weight updates, not their gradients.

As soon as the gradient of a parameter is available, each rank makes the wrapped optimizer's step
for it from its own gradient alone, and keeps the difference. Adasum combines the differences of all
ranks: orthogonal ones are added, parallel ones are averaged. `step()` then adds the result to the
weights from before. So the learning rate need not grow with the number of ranks.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from allstep import faults
from allstep.hvd.attached import keep_attached
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.parallel.exchange import Named
from allstep.parallel.subclass import wrapped
from allstep.torch.mpi_ops import Adasum, allreduce_async_, synchronize


def make_adasum(
    optimizer: Optimizer, named: list[Named], compression: Any, passes: int, process_set: ProcessSet
) -> "_AdasumOptimizer":
    """Return a new optimizer that combines the updates of `optimizer` by Adasum.

    `passes`: backward passes per step. Raise NotImplementedError for a subset of the ranks.
    """
    if process_set is not global_process_set:
        raise NotImplementedError(
            "op=hvd.Adasum works on the whole world only, not on a process set"
        )
    made = wrapped(optimizer, _AdasumOptimizer)
    made._attach(named, compression, passes)
    return made  # type: ignore[no-any-return]


class _AdasumOptimizer(Optimizer):
    """The methods that are added to the wrapped optimizer's class."""

    def _attach(self, named: list[Named], compression: Any, passes: int) -> None:
        self._parameter_names = {parameter: name for name, parameter in named}
        self._compression = compression
        self.backward_passes_per_step = passes
        self.op = Adasum
        self.process_set = global_process_set
        # For each parameter: handle, tensor that is sent, context for decompressing it.
        self._handles: dict[Tensor, tuple[int, Tensor, Any]] = {}
        self._allreduce_delay: dict[Tensor, int] = {}
        for _, parameter in named:
            if parameter.requires_grad:
                self._allreduce_delay[parameter] = passes
                register = parameter.register_post_accumulate_grad_hook
                register(self._note)  # type: ignore[no-untyped-call]
        keep_attached(self)

    def _attach_to_engine(self) -> None:
        """Do nothing: updates use whichever engine runs."""

    def _detach_from_engine(self) -> None:
        """Drop the updates in progress, and the gradients that they come from."""
        for parameter, left in self._allreduce_delay.items():
            if left < self.backward_passes_per_step:
                parameter.grad = None
        self._handles.clear()
        self._reset_delays()

    def _note(self, parameter: Tensor) -> None:
        """Count a backward pass of a parameter; start its update after the last one."""
        if parameter in self._handles:
            name = self._parameter_names[parameter]  # type: ignore[index]
            raise AssertionError(
                f"gradients of {name} were computed more than backward_passes_per_step times before"
                " the call to step(): raise backward_passes_per_step (it is"
                f" {self.backward_passes_per_step})"
            )
        self._allreduce_delay[parameter] -= 1
        if self._allreduce_delay[parameter] == 0:
            self._start(parameter)

    def _start(self, parameter: Tensor) -> None:
        """Make a step with our own gradient, undo it, and send the difference."""
        with torch.no_grad():
            before = parameter.detach().clone()
            self._step_alone(parameter)
            difference = parameter - before
            parameter.copy_(before)
        sent, context = self._compression.compress(difference.contiguous())
        name = self._parameter_names[parameter]  # type: ignore[index]
        self._handles[parameter] = (
            allreduce_async_(sent, name=name, op=Adasum),
            sent,
            context,
        )

    def _step_alone(self, parameter: Tensor) -> None:
        """Make the wrapped optimizer's step for one parameter."""
        stashed = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [each for each in group["params"] if each is parameter]
            super().step()
        finally:
            for group, parameters in zip(self.param_groups, stashed, strict=True):
                group["params"] = parameters

    def synchronize(self) -> None:
        """Do nothing: `step` waits."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError, since there are no reduced gradients."""
        raise AssertionError(
            "skip_synchronize cannot be used with op=hvd.Adasum: updates are combined, not"
            " gradients"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the updates of all ranks and apply them; return the closure's loss, if any."""
        if faults.active is not None:
            # Gradients were used during backward(), and weights are restored there.
            faults.active.in_step(unable=("nan", "flip"))
            faults.active.reduce_begins()
        loss = None if closure is None else closure()
        for parameter in self._allreduce_delay:
            if parameter not in self._handles:
                self._start(parameter)
        with torch.no_grad():
            for parameter, (handle, sent, context) in self._handles.items():
                synchronize(handle)
                difference = self._compression.decompress(sent, context)
                parameter.add_(difference.view(parameter.shape))
        self._handles.clear()
        self._reset_delays()
        if faults.active is not None:
            faults.active.step_ends()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; raise AssertionError while updates are in progress."""
        if self._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before"
                " optimizer.step(): the updates that are being combined would be lost"
            )
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes are added up before a step."""
        self.backward_passes_per_step = passes
        self._reset_delays()

    def _reset_delays(self) -> None:
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = self.backward_passes_per_step
