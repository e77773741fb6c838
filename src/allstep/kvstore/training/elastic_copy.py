"""`sync=elastic:H` (EASGD, arXiv 1412.6651): parties train alone, tied to a center by a spring.

```
party 0   step step ... step  move          step step ... step  move
center    ───────────────────── o ──────── o ──────────────────── o ──
party 1        step step ... step  move          step ...      H steps each
```

Each party updates weights of its own with its own optimizer state. After H steps it and the center
move toward each other:

    d       alpha * (own weights - center)
    own     own weights - d
    center  center + d

The center is in shared memory, cut into units with a lock each, as the weights of the other modes;
a move is a push, so parties do not wait, a dead party leaves at most one move half made, and claims
of H steps are given out again until their move is complete. alpha is 0.9 / parties by default, as
in the paper: the center then moves by 0.9 of the mean distance while each party moves once. With
momentum in the inner optimizer this is what the paper calls EAMSGD.

At a synchronization point all parties take the center, and the mean of their optimizer states, so
that evaluations and checkpoints are of the center and have one state.
"""

from typing import Any

import torch
from torch import Tensor

from allstep.kvstore.training.model_copy import ModelCopy
from allstep.kvstore.training.unit_updates import StateLayout, UnitUpdates, private_memory

ALPHA = 0.9
"""alpha times the number of parties, by default: the paper's beta."""


def own_states(plan: StateLayout) -> list[Tensor]:
    """Return tensors like those of `states_to_average`, to reserve memory for their mean."""
    _, states = plan.place(private_memory(plan.nbytes))
    flags = torch.zeros(len(plan.layout.units), dtype=torch.float64)
    return [flags, *(view for unit in states for each in unit for view in each.views)]


class ElasticCopy(ModelCopy):
    """The center and a party's own weights and state. `alpha`: set before the first move."""

    def __init__(
        self, outer: Any, wrapped: type, plan: StateLayout, present: memoryview, state: memoryview
    ) -> None:
        super().__init__(outer, wrapped, plan, present, state)
        self.alpha = ALPHA
        self._shared, self._private = state[: plan.nbytes], private_memory(plan.nbytes)
        self.published = self.updates
        self.updates = UnitUpdates(outer, wrapped, plan, self.own, self._private)
        # Whether units have state, as numbers that can be averaged.
        self._flags = torch.zeros(len(self.layout.units), dtype=torch.float64)

    def step(self) -> None:
        """Update the own weights with our gradient, by the options of `use_groups`."""
        for index in range(len(self.layout.units)):
            self.updates.apply(index, self._gradients, self.missing)
        self.bump_versions()

    def apply(self, index: int, delay: float) -> None:
        """Move a unit of our weights and the center toward each other."""
        unit = self.layout.units[index]
        part = slice(unit.start, unit.end)
        own, center = self.own[unit.flat][part], self.present[unit.flat][part]
        difference = (own - center).mul_(self.alpha)
        center.add_(difference)
        own.sub_(difference)

    def pull_after_push(self, index: int) -> None:
        """Do nothing: a move has changed our weights, too."""

    # The optimizer's state at a synchronization point

    def states_to_average(self) -> list[Tensor]:
        """Return the tensors whose mean over the parties all of them take."""
        views = [view for unit in self.updates.states for each in unit for view in each.views]
        return [self._flags, *views]

    def before_average(self) -> None:
        """Note which units have state."""
        self._flags.copy_(torch.tensor(self.updates.has_state.tolist(), dtype=torch.float64))

    def after_average(self) -> None:
        """Keep which units have state on any party."""
        for index, flag in enumerate(self._flags.tolist()):
            self.updates.has_state[index] = flag > 0

    def take_published(self) -> None:
        """Take the state that the leader has published."""
        self._private[: len(self._shared)] = self._shared
