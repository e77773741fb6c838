"""The weights that updates change, and what a party needs to compute a gradient: its own copy.

```
present     flats in shared memory: the newest weights, with the optimizer's state
own         flats of this party; the model's parameters are views of them
gradients   flats of this party: the gradient that it pushes
```

A party never computes with the shared weights themselves: others change them between its forward
and its backward pass, so that the gradient would be that of no weights at all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.errors import UserError
from allstep.kvstore.training.corrections import compensate
from allstep.kvstore.training.unit_updates import (
    StateLayout,
    UnitUpdates,
    flats_in,
    private_memory,
)


class ModelCopy:
    """The weights of a model in flat memory. present, state: that memory.

    outer: the optimizer, with learning rates as set for whole batches. wrapped: its class.
    """

    def __init__(
        self, outer: Any, wrapped: type, plan: StateLayout, present: memoryview, state: memoryview
    ) -> None:
        self.layout = layout = plan.layout
        self.present = flats_in(layout, present)
        self.updates = UnitUpdates(outer, wrapped, plan, self.present, state)
        self.published = self.updates
        """The updates with whose state `take_state` begins: those in shared memory."""
        self.own, self._gradients = self._new_flats(), self._new_flats()
        self._views, self._own_views = layout.views(self._gradients), layout.views(self.own)
        self._parameters = {number: layout.named[number].parameter for number in self._views}
        self.missing: set[int] = set()
        self._take_parameters()

    def _new_flats(self) -> list[Tensor]:
        return flats_in(self.layout, private_memory(self.layout.nbytes))

    def _take_parameters(self) -> None:
        """Let the model's parameters be views of our copy."""
        for number, parameter in self._parameters.items():
            self._own_views[number].copy_(parameter.detach())
            parameter.data = self._own_views[number]

    def check_parameters(self) -> None:
        """Raise UserError if parameters of the model were moved elsewhere."""
        for number, parameter in self._parameters.items():
            if parameter.data_ptr() != self._own_views[number].data_ptr() and parameter.numel():
                raise UserError(
                    f"parameter {self.layout.named[number].name!r} was moved (model.to,"
                    " load_state_dict(assign=True)) after its weights were shared; change weights"
                    " in place, and call publish()"
                )

    # Gradients

    def take_gradients(self, weight: float | None = None, is_first: bool = True) -> None:
        """Copy the gradients of the parameters, or add them `weight` times to those of a block."""
        found = {}
        for number, parameter in self._parameters.items():
            if (gradient := parameter.grad) is not None:
                found[number] = gradient.to_dense() if gradient.is_sparse else gradient
        if is_first:
            # Gaps always have a gradient of zero; an absent gradient counts as zero.
            self.missing = set(self._parameters)
            for number in self._parameters.keys() - found.keys():
                self._views[number].zero_()
        self.missing -= found.keys()
        views, gradients = [self._views[number] for number in found], [*found.values()]
        if not found:
            return
        if weight is None:
            torch._foreach_copy_(views, gradients)
        elif is_first:
            torch._foreach_copy_(views, gradients)
            torch._foreach_mul_(views, weight)
        else:
            torch._foreach_add_(views, gradients, alpha=weight)

    def divide_gradients(self, total: float) -> None:
        """Divide the sum of a block's gradients by the sum of their weights."""
        torch._foreach_div_(list(self._views.values()), total)

    # Units

    def use_groups(self, groups: Sequence[Mapping[str, Any]], lrs: Sequence[float]) -> None:
        """Set the options of the next push, and its learning rate for each group."""
        self.updates.use_groups(groups, lrs)

    def apply(self, index: int, delay: float) -> None:
        """Update a unit with our gradient. delay: strength of the compensation; 0: none."""
        unit = self.layout.units[index]
        if delay:
            part = slice(unit.start, unit.end)
            gradient, now = self._gradients[unit.flat][part], self.present[unit.flat][part]
            compensate(gradient, now, self.own[unit.flat][part], delay)
        self.updates.apply(index, self._gradients, self.missing)

    def pull(self, index: int) -> None:
        """Copy the newest weights of a unit to ours."""
        unit = self.layout.units[index]
        part = slice(unit.start, unit.end)
        self.own[unit.flat][part].copy_(self.present[unit.flat][part])

    def pull_after_push(self, index: int) -> None:
        """Copy a unit that we have just pushed to."""
        self.pull(index)

    def step(self) -> None:
        """Do what a party does with a gradient that it does not push; only `elastic` does."""

    def states_to_average(self) -> list[Tensor]:
        """Return the state of this party alone; none, since all parties share theirs."""
        return []

    def before_average(self) -> None:
        """Called before the tensors of a synchronization point are averaged."""

    def after_average(self) -> None:
        """Called after that."""

    def take_published(self) -> None:
        """Use the state that the leader has published; all parties share it already."""

    def put(self) -> None:
        """Make our weights the newest ones."""
        for present, own in zip(self.present, self.own, strict=True):
            present.copy_(own)

    def bump_versions(self) -> None:
        """Increase the version counters of the parameters, which have changed behind autograd."""
        for parameter in self._parameters.values():
            torch._C._autograd._unsafe_set_version_counter((parameter,), (parameter._version + 1,))
