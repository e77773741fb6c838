"""`Owners`: each rank of a host gets the sums of the gradients that it updates, and of no others.

```
gradients   | conv1 | conv2 |        fc1        | fc2 |      every rank has all of its own
            |<------ rank 0 ------>|<------ rank 1 ------>|  each owner gets the sums of its ranges
```

Gradients of ranges that other ranks own are passed to them in shared memory (`owner_sums`); with
several hosts the sums of a range are then added to those of its owners on the other hosts. It is
the first half of an allreduce: the weights are shared (`shared_parameters`), so no rank needs the
second half.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from allstep.comm.group.plan import call_of
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.group.within_host import SharedMemoryTransport
from allstep.comm.op.gradient_norms import share_of
from allstep.errors import CommError
from allstep.parallel.exchange.bucketed import Bucketed
from allstep.parallel.exchange.buckets import Bucket, is_large
from allstep.parallel.exchange.exchange import Listener, Rule
from allstep.parallel.exchange.owner_ranges import ParameterRange, by_elements, by_whole_parameters
from allstep.parallel.exchange.owner_sums import Schedule, deliver
from allstep.parallel.exchange.packed_gradients import flat_in_memory
from allstep.parallel.exchange.parameter_order import Named


class Owners(Bucketed):
    """Leaves the sums of its own ranges in each rank's gradients; other elements are undefined.

    `whole`: give owners whole parameters, for optimizers that use more than one element at a time.
    `listener`: notified of each step.
    """

    def __init__(
        self,
        group: AllstepGroup,
        key: str,
        named: Sequence[Named],
        rule: Rule,
        whole: bool,
        listener: Listener | None = None,
    ) -> None:
        super().__init__(group, key, named, rule, overlap=False, listener=listener)
        local = group.local
        if not isinstance(local, SharedMemoryTransport):
            raise CommError(
                "share_weights needs ranks that can share memory; `allstep doctor` shows why they"
                " cannot",
                rank=group.rank(),
            )
        self.local = local
        self._whole = whole
        self._call = call_of(f"shared weights {key}")
        self._agree()

    def meet(self) -> None:
        """Wait for all ranks of the host; then this rank sees what the others have written."""
        self.local.carry_out(self._call, lambda arena: arena.barrier(self._call))

    @property
    def own_ranges(self) -> list[ParameterRange]:
        """The ranges that this rank updates."""
        rank = self.local.arena.rank
        return self.owned[rank] if rank < len(self.owned) else []

    def _prepare(self) -> None:
        arena = self.local.arena
        sizes = [each.parameter.numel() for each in self.named]
        deal = by_whole_parameters if self._whole else by_elements
        self.owned: list[list[ParameterRange]] = deal(
            sizes, self.local.layout.num_lanes or arena.size
        )
        dtypes = dict.fromkeys(each.parameter.dtype for each in self.named)
        self._schedules = {dtype: Schedule(arena, self._owned_of(dtype), dtype) for dtype in dtypes}

    def _owned_of(self, dtype: torch.dtype) -> list[list[ParameterRange]]:
        return [
            [span for span in share if self.named[span.number].parameter.dtype == dtype]
            for share in self.owned
        ]

    def _needs_its_layout(self, parameter: Parameter) -> bool:
        return True

    def _results(self, gradients: dict[int, Tensor]) -> list[Tensor]:
        return self._own_slices(gradients)

    def _sum(self, bucket: Bucket, gradients: dict[int, Tensor], scale: float) -> None:
        for dtype, schedule in self._schedules.items():
            flats = {
                number: flat_in_memory(gradient)
                for number, gradient in gradients.items()
                if gradient.dtype == dtype
            }
            # Over several hosts the sum of one host is not yet the mean.
            mean = self.mean if self.local.crossing is None else None
            self.local.carry_out(
                self._call, deliver, schedule, flats, scale, self._call, self.own, mean
            )
        self._sum_over_hosts(gradients)

    def _sum_over_hosts(self, gradients: dict[int, Tensor]) -> None:
        """Add our ranges over all hosts: large ones in their memory, small ones together."""
        if self.local.crossing is None:
            return
        small: dict[torch.dtype, list[Tensor]] = {}
        for flat in self._own_slices(gradients):
            if is_large(flat):
                self._sum_and_measure(flat)
            else:
                small.setdefault(flat.dtype, []).append(flat)
        for together in small.values():
            packed = torch.cat(together)
            self._sum_and_measure(packed)
            torch._foreach_copy_(
                together, torch.split_with_sizes(packed, [flat.numel() for flat in together])
            )

    def _own_slices(self, gradients: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the flat slices of these gradients that this rank owns."""
        return [
            flat_in_memory(gradients[number])[start:end]
            for number, start, end in self.own_ranges
            if number in gradients
        ]

    def _sum_and_measure(self, flat: Tensor) -> None:
        """Add a flat tensor over the hosts, and measure the mean."""
        self.local.carry_out(self._call, lambda _: self._sum_across(flat))
        # Every host has the sum, so each measures its slice.
        if self.mean is not None:
            self.mean.add(share_of(flat, self.local.layout.host, len(self.local.layout.hosts)))

    def _sum_across(self, flat: Tensor) -> None:
        assert self.local.crossing is not None
        self.local.crossing.get_ready()
        self.local.crossing.carry(flat, torch.add)
