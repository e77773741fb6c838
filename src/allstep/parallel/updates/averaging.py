"""`Averaging`: each rank steps on its own weights; at intervals all take the mean of the weights.

```
round      rank 0   step  step  step  step ┐             ┌ the same weights everywhere
           rank 1   step  step  step  step ┤  mean, then │ step  step  ...
           rank 2   step  step  step  step ┘  outer step └
```

Two modes use it: `local:H` (local SGD) and `diloco:H`, with an outer step that has momentum
(`outer_step`). In a round no rank waits for another: gradients stay on the rank.

With a `host_group` the parties are hosts: the ranks of a host reduce their gradients at every step,
so they stay equal, and the mean over all ranks is that over hosts, weighted by their samples.

What is averaged is the difference to the common weights before the round, weighted by the samples
behind each rank's steps, in a few large buffers (`flat_tensors`). So a tensor that no rank changed
keeps its bits. Besides the optimizer's parameters, with or without gradients, `also` names further
tensors (buffers, frozen parameters), which get the plain mean.

A rank whose step has no samples (`weight = 0`) does not step. The inner optimizer's state stays on
its rank; a checkpoint at the end of a round has that of all ranks (`party_states`).

All collectives of an average come before its first change, so that a rank that is lost leaves
weights as they were. In an elastic run a round that failed is undone (`undo`): weights and inner
state are again those of its start, and the ranks that are left repeat it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allstep.comm.group.process_group import AllstepGroup
from allstep.parallel.exchange import Named, Owners
from allstep.parallel.updates.flat_tensors import FlatTensors, broadcast, signature_of
from allstep.parallel.updates.outer_step import PLAIN, OuterStep
from allstep.parallel.updates.party_states import OUTER, gather, num_parties, taken
from allstep.parallel.updates.update import Replica


class Averaging:
    """Averages weights instead of gradients.

    `every`: steps between two averages; 0: only `synchronize` averages. `outer`: the outer step.
    `also`: returns further tensors to average, under names that are the same on all ranks. `is_on`:
    False reduces gradients at each step instead, until `switch`.
    `keeps_undo`: keep what `undo` needs. `host_group`: returns the ranks with which this one forms
    a party; None if it is one by itself.
    """

    state_is_per_rank = True

    def __init__(
        self,
        every: int = 0,
        outer: OuterStep = PLAIN,
        also: Callable[[], Sequence[Named]] = list,
        *,
        is_on: bool = True,
        keeps_undo: bool = False,
        host_group: Callable[[], AllstepGroup | None] = lambda: None,
    ) -> None:
        self._host_group = host_group
        self.every, self.outer, self.is_on = every, outer, is_on
        self._also, self._keeps_undo = also, keeps_undo
        # Copy of the optimizer's state at the start of the round.
        self._state_before: dict[Any, dict[str, Any]] | None = None
        self._steps, self._samples = 0, 0.0
        self._common: _Common | None = None
        # How often all ranks of this world have made it.
        self._agreements = 0
        # Whether `optimizer.state` has been loaded, with entries of all parties.
        self._is_loaded = True
        # Entries of the other parties for `state_dict`, by number of the parameter.
        self._gathered: dict[int, dict[str, Any]] = {}

    def start(self, optimizer: Replica) -> None:
        """Do nothing: the first step makes the weights equal."""

    def switch(self, optimizer: Replica, is_on: bool) -> None:
        """Average weights from now on, or gradients. All ranks call it after the same step."""
        if is_on != self.is_on:
            self.is_on = is_on
            # It would reduce gradients during backward().
            optimizer._drop_exchange()

    # A step

    def reduces_gradients(self, optimizer: Replica) -> bool:
        """Return whether gradients leave their rank: in a round within a party only."""
        return not self.is_on or self.steps_together

    @property
    def steps_together(self) -> bool:
        """Whether this rank shares its party with others, which make every step with it."""
        return self._host_group() is not None

    def gradient_group(self, optimizer: Replica) -> AllstepGroup:
        """Return the ranks of the party in a round, else all ranks."""
        within = self._host_group() if self.is_on else None
        return optimizer._replicas.group() if within is None else within

    def reduce(self, optimizer: Replica) -> None:
        """Reduce the gradients within the party; measure and clip them."""
        optimizer._reduce_all()

    def use_reduced(self, optimizer: Replica) -> None:
        """Do nothing: the wrapped optimizer uses the gradients as they are."""

    def apply(self, optimizer: Replica, closure: Callable[[], Any] | None) -> Any:
        """Step on this rank's weights; average them if the round is complete."""
        if not self.is_on:
            return optimizer._own_step(closure)
        self._begin(optimizer)
        self._gathered = {}
        result = None
        # The others of a party may have samples; without any, there is no gradient.
        if closure is not None or optimizer._last_weight != 0 or self.steps_together:
            result = optimizer._own_step(closure)
        self._steps += 1
        self._samples += 1.0 if optimizer._last_weight is None else optimizer._last_weight
        if self._steps == self.every:
            self.synchronize(optimizer)
        return result

    def owners(self, optimizer: Replica) -> Owners | None:
        """Return None: every rank updates all weights."""
        return None

    # An average

    def synchronize(self, optimizer: Replica) -> None:
        """End the round: average the weights. All ranks call it together."""
        if self.is_on:
            self._begin(optimizer)
            if optimizer._reduces:
                optimizer._begin_step()
            self._average(optimizer)

    def participate(self, optimizer: Replica) -> None:
        """Answer what the other ranks do, with what this rank did before it joined."""
        if not self.is_on:
            optimizer._participate_in_reduction()
        elif self._common is None:
            self._prepare(optimizer)
        else:
            self._average(optimizer, has_joined=True)

    def _begin(self, optimizer: Replica) -> None:
        """Make weights equal on all ranks, unless a round has begun."""
        common = self._common
        is_ready = common is not None and not self._is_loaded
        # The tensors are compared once per round: that takes time.
        if is_ready and not self._steps and common is not None:
            is_ready = common.fits(self._named(optimizer))
        if not is_ready:
            if optimizer._reduces:
                optimizer._begin_step()
            self._prepare(optimizer)

    def _named(self, optimizer: Replica) -> tuple[Sequence[Named], Sequence[Named]]:
        return optimizer._replicas.named, self._also()

    def _prepare(self, optimizer: Replica) -> None:
        replicas = optimizer._replicas
        if self._common is not None and not self._is_loaded:
            self._common.keep_velocity(optimizer.state)
        group = replicas.group() if optimizer._reduces else None
        self._agreements += 1
        key = f"{replicas.key()}/{self._agreements}" if group is not None else ""
        self._common = _Common(group, key, *self._named(optimizer), self.outer)
        self._common.take_state(optimizer.state)
        self._is_loaded = False
        self._start_round(optimizer)

    def _average(self, optimizer: Replica, has_joined: bool = False) -> None:
        assert self._common is not None
        nbytes = self._common.average(self._samples, has_joined)
        optimizer.traffic.add(nbytes, nbytes)
        self._start_round(optimizer)

    def _start_round(self, optimizer: Replica) -> None:
        self._steps, self._samples, self._gathered = 0, 0.0, {}
        if self._keeps_undo:
            self._state_before = _copied(optimizer.state)

    def undo(self, optimizer: Replica) -> None:
        """Return to the start of the round; needs `keeps_undo`. Not a collective."""
        if self._common is not None and self._state_before is not None:
            self._common.restore()
            optimizer.state.clear()
            optimizer.state.update(_copied(self._state_before))
            self._steps, self._samples, self._gathered = 0, 0.0, {}

    def detach(self, optimizer: Replica) -> None:
        """Keep the outer momentum in the optimizer's state; the next step begins a round."""
        if self._common is not None and not self._is_loaded:
            self._common.keep_velocity(optimizer.state)
        self._common, self._is_loaded, self._gathered = None, True, {}
        self._agreements, self._state_before = 0, None

    # The optimizer's state

    def gather_state(self, optimizer: Replica) -> None:
        """Collect the state of all ranks on the first one, until the next step."""
        if self.is_on:
            self._begin(optimizer)
            assert self._common is not None
            self._gathered = self._common.gather(optimizer.state)

    @contextmanager
    def state_filled(self, optimizer: Replica) -> Iterator[None]:
        """Let `state` hold the outer momentum and what was gathered within the block."""
        if self._common is None or self._is_loaded:
            yield
            return
        own = {key: optimizer.state[key] for key in list(optimizer.state)}
        self._common.fill(optimizer.state, self._gathered)
        try:
            yield
        finally:
            optimizer.state.clear()
            optimizer.state.update(own)

    @contextmanager
    def state_changed(self, optimizer: Replica) -> Iterator[None]:
        """Give `state` the outer momentum within the block; the next step takes it over."""
        if self._common is not None and not self._is_loaded:
            self._common.keep_velocity(optimizer.state)
        yield
        self.take_state(optimizer)

    def take_state(self, optimizer: Replica) -> None:
        """Take over a loaded state at the next step, which all ranks make together.

        Not now: a script may load it on one rank, and broadcast it.
        """
        self._is_loaded = True


def _copied(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {
        parameter: {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        for parameter, entries in state.items()
    }


class _Common:
    """The weights that all ranks had at the start of the round, and the outer step's momentum.

    All ranks make it together; it gives them the first rank's weights and outer momentum.
    """

    def __init__(
        self,
        group: AllstepGroup | None,
        key: str,
        named: Sequence[Named],
        also: Sequence[Named],
        outer: OuterStep,
    ) -> None:
        self._group, self._outer = group, outer
        self._signature = signature_of(named), signature_of(also)
        own = {id(each.parameter) for each in named}
        others = [each for each in also if id(each.parameter) not in own]
        self._weights = FlatTensors(group, f"{key}/weights", named)
        self._others = FlatTensors(group, f"{key}/others", others)
        # Buffers like theirs, with the weights at the start of the round.
        self._weights_before = self._weights.take_first()
        self._others_before = self._others.take_first()
        self._velocity = (
            [torch.zeros_like(flat) for flat in self._weights_before] if outer.momentum else []
        )

    def fits(self, named: tuple[Sequence[Named], Sequence[Named]]) -> bool:
        """Return whether these are the tensors for which the buffers were made."""
        return self._signature == (signature_of(named[0]), signature_of(named[1]))

    @torch.no_grad()
    def average(self, samples: float, has_joined: bool) -> int:
        """Replace the weights by the outer step on the mean of the ranks, weighted by samples.

        Return the bytes that were exchanged.

        `has_joined`: this rank has no more steps to make, and is called by another thread.
        """
        share, any_joined = self._share(samples, has_joined)
        # No rank has made a step since the last average.
        if share is None:
            return 0
        weights = self._weights.mean_difference(self._weights_before, share)
        others = self._others.mean_difference(self._others_before, share)
        # From here on no other rank is needed.
        velocities: Sequence[Tensor | None] = self._velocity or [None] * len(weights)
        for before, difference, velocity in zip(
            self._weights_before, weights, velocities, strict=True
        ):
            self._outer.update(before, difference, velocity)
        for before, difference in zip(self._others_before, others, strict=True):
            before.sub_(difference)
        self.restore()
        if any_joined:
            # The others may join next, after which the script of this rank uses the weights.
            self._meet()
        if self._group is None:
            return 0
        return sum(each.nbytes for each in (*self._weights_before, *self._others_before))

    def restore(self) -> None:
        """Give this rank the weights from the start of the round."""
        self._weights.write(self._weights_before)
        self._others.write(self._others_before)

    def _share(self, samples: float, has_joined: bool) -> tuple[float | None, bool]:
        """Return this rank's part of all samples, and whether any rank has joined.

        The part is None if there are no samples.
        """
        if self._group is None:
            return 1.0 if samples else None, False
        sums = np.zeros(self._group.size() + 1)
        sums[self._group.rank()], sums[-1] = samples, has_joined
        self._group.allreduce([torch.from_numpy(sums)]).wait()
        total = sums[:-1].sum()
        return float(samples / total) if total else None, bool(sums[-1])

    def _meet(self) -> None:
        """Wait until all ranks have their new weights."""
        assert self._group is not None
        self._group.allreduce([torch.zeros(1)]).wait()

    # The optimizer's state

    @torch.no_grad()
    def take_state(self, state: dict[Any, dict[str, Any]]) -> None:
        """Take the outer momentum from a loaded state, and leave this rank's own entries in it."""
        rank, size = (0, 1) if self._group is None else (self._group.rank(), self._group.size())
        parties = num_parties(state)
        for number, view in self._weights.split(self._velocity):
            entries = state.get(self._weights.named[number].parameter, {})
            if OUTER in entries:
                view.copy_(entries[OUTER])
        broadcast(self._group, self._velocity)
        for _, parameter in self._weights.named:
            if parameter in state:
                state[parameter] = taken(state[parameter], parameter, rank, size, parties)

    def keep_velocity(self, state: dict[Any, dict[str, Any]]) -> None:
        """Add a copy of the outer momentum to the state."""
        for number, view in self._weights.split(self._velocity):
            parameter = self._weights.named[number].parameter
            state[parameter] = {**state.get(parameter, {}), OUTER: view.clone()}

    def gather(self, state: dict[Any, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return entries with the states of the other ranks, by number; empty but on rank 0."""
        return {} if self._group is None else gather(self._group, self._weights.named, state)

    def fill(self, state: dict[Any, dict[str, Any]], gathered: dict[int, dict[str, Any]]) -> None:
        """Add the outer momentum, and what was gathered, to the state."""
        self.keep_velocity(state)
        for number, entries in gathered.items():
            parameter = self._weights.named[number].parameter
            state[parameter] = {**state.get(parameter, {}), **entries}
