"""`Owners`: each rank of a host gets the sums of the gradients that it updates, and of no others.

```
gradients   | conv1 | conv2 |        fc1        | fc2 |      every rank has all of its own
            |<------ rank 0 ------>|<------ rank 1 ------>|  each owner gets the sums of its ranges
```

Gradients of ranges that other ranks own are passed to them in shared memory (`owner_sums`); with
several hosts the sums of a range are then added to those of its owners on the other hosts. It is
the first half of an allreduce: the weights are shared (`shared_parameters`), so no rank needs the
second half.

With several hosts there are two kinds of owners:

```
one on each host     rank 0 of every host owns its range: hosts exchange sums, and update alike.
                     A host that is lost takes nothing along (elastic runs, share_weights)
one in the run       the range is divided among the ranks 0 of the hosts: each gets the sums of its
                     part, updates it, and sends the weights to the other hosts (sync=server)
```
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
from allstep.parallel.exchange.buckets import Bucket
from allstep.parallel.exchange.exchange import Listener, Rule
from allstep.parallel.exchange.owner_ranges import ParameterRange, by_elements, by_whole_parameters
from allstep.parallel.exchange.owner_sums import Schedule, deliver
from allstep.parallel.exchange.packed_gradients import flat_in_memory
from allstep.parallel.exchange.packed_small import Packed
from allstep.parallel.exchange.parameter_order import Named


class Owners(Bucketed):
    """Leaves the sums of its own ranges in each rank's gradients; other elements are undefined.

    `whole`: give owners whole parameters, for optimizers that use more than one element at a time.
    `one_in_run`: with several hosts, let each element have one owner in the run instead of one on
    each host. `listener`: notified of each step.
    """

    def __init__(
        self,
        group: AllstepGroup,
        key: str,
        named: Sequence[Named],
        rule: Rule,
        whole: bool,
        listener: Listener | None = None,
        one_in_run: bool = False,
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
        self.one_in_run = one_in_run and local.crossing is not None
        self._call = call_of(f"shared weights {key}")
        self._agree()

    def meet(self) -> None:
        """Wait for all ranks of the host; then this rank sees what the others have written."""
        self.local.carry_out(self._call, lambda arena: arena.barrier(self._call))

    @property
    def own_ranges(self) -> list[ParameterRange]:
        """The ranges that this rank updates."""
        host = self.local.layout.host if self.one_in_run else 0
        return self._of_lane[host] if self._of_lane else []

    @property
    def num_owners(self) -> int:
        """The number of ranks that own a part of the weights, in the run or on each host."""
        num_parts = len(self.local.layout.hosts) if self.one_in_run else 1
        return len(self.owned) * num_parts

    @property
    def owns_first(self) -> bool:
        """Whether this rank is the only owner of its ranges, or the one of the first host."""
        return self.one_in_run or self.local.layout.host == 0

    def _prepare(self) -> None:
        arena = self.local.arena
        sizes = [each.parameter.numel() for each in self.named]
        deal = by_whole_parameters if self._whole else by_elements
        num_lanes = self.local.layout.num_lanes or arena.size
        num_parts = len(self.local.layout.hosts) if self.one_in_run else 1
        parts = deal(sizes, num_lanes * num_parts)
        lanes = [parts[first : first + num_parts] for first in range(0, len(parts), num_parts)]
        # By rank of the host: what it gets the sums of its host of.
        self.owned = [[span for part in lane for span in part] for lane in lanes]
        # By host: the ranges of the ranks with our local rank.
        self._of_lane = lanes[arena.rank] if arena.rank < len(lanes) else []
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
        if self.one_in_run:
            self._sum_for_owners(gradients)
            return
        packed = Packed(self._own_slices(gradients))
        for flat in packed.tensors:
            self._sum_and_measure(flat)
        packed.unpack()

    def _sum_for_owners(self, gradients: Mapping[int, Tensor]) -> None:
        """Add the ranges of each host's owner for it, and measure the mean of ours."""
        flats = {number: flat_in_memory(each) for number, each in gradients.items()}
        packed = [Packed(self._slices_of(spans, flats)) for spans in self._of_lane]
        crossing, parts = self.local.crossing, [each.tensors for each in packed]
        assert crossing is not None
        self.local.carry_out(self._call, lambda _: crossing.sum_for_owners(parts, torch.add))
        if packed:
            packed[self.local.layout.host].unpack()
        if self.mean is not None:
            for flat in self._own_slices(gradients):
                self.mean.add(flat)

    def send_owned(self, flats: Sequence[Sequence[Tensor]]) -> None:
        """Send what this rank owns to the other hosts, and receive what their owners have.

        flats: by host, tensors in the order of the owner's ranges, the same sizes on all hosts.
        """
        packed = [Packed(each) for each in flats]
        crossing, parts = self.local.crossing, [each.tensors for each in packed]
        assert crossing is not None
        self.local.carry_out(self._call, lambda _: crossing.from_owners(parts))
        for host, each in enumerate(packed):
            if host != self.local.layout.host:
                each.unpack()

    @property
    def ranges_by_host(self) -> Sequence[Sequence[ParameterRange]]:
        """The ranges of the owners with our local rank; empty for a rank without a lane."""
        return self._of_lane if self.one_in_run else []

    @staticmethod
    def _slices_of(ranges: Sequence[ParameterRange], flats: Mapping[int, Tensor]) -> list[Tensor]:
        return [flats[number][start:end] for number, start, end in ranges if number in flats]

    def _own_slices(self, gradients: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the flat slices of these gradients that this rank owns."""
        flats = {number: flat_in_memory(each) for number, each in gradients.items()}
        return self._slices_of(self.own_ranges, flats)

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
