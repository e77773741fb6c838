"""`AllReduce`: the gradients of all ranks are combined on every rank, to their mean, their sum, or
their mean by samples.

```
large       each gradient by itself, in its memory                no copy
small       together, in one buffer that the ranks share          copied in and out, in one call
```
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from allstep.comm.group.plan import call_of
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.group.within_host import SharedMemoryTransport
from allstep.comm.memory import reduce as summing
from allstep.comm.op.describe import describe
from allstep.comm.op.gradient_norms import share_of
from allstep.comm.op.transport import Transport
from allstep.parallel.exchange.bucketed import Bucketed
from allstep.parallel.exchange.buckets import BUCKET, Bucket, small_parameters
from allstep.parallel.exchange.exchange import Listener, Rule
from allstep.parallel.exchange.packed_gradients import flat_in_memory, make_pack
from allstep.parallel.exchange.parameter_order import Named

# Elements that stay in the cache from one use to the next.
_BLOCK = 1 << 18
_EXACT = (torch.float32, torch.float64)


class AllReduce(Bucketed):
    """Gives every rank every gradient.

    `key`: distinguishes these parameters from others on the same group. `overlap`: whether buckets
    are reduced while other gradients are computed; default: only if a network is between the ranks.
    `listener`: notified of each bucket. `limit`: bytes of a bucket if there are several.
    """

    def __init__(
        self,
        group: AllstepGroup,
        key: str,
        named: Sequence[Named],
        rule: Rule,
        overlap: bool | None = None,
        listener: Listener | None = None,
        limit: int = BUCKET,
    ) -> None:
        overlaps = _crosses_hosts(group) if overlap is None else overlap
        super().__init__(group, key, named, rule, overlap=overlaps, listener=listener, limit=limit)

    def _prepare(self) -> None:
        for bucket in self._buckets:
            bucket.packs = [
                make_pack(self.group, self.named, numbers)
                for numbers in small_parameters(self.named, bucket)
            ]

    def _results(self, gradients: dict[int, Tensor]) -> list[Tensor]:
        return list(gradients.values())

    def _sum(self, bucket: Bucket, gradients: dict[int, Tensor], scale: float) -> None:
        if self.rule.compress is not None:
            self._sum_compressed(gradients, scale)
            return
        small = {number for pack in bucket.packs for number in pack.views}
        for number, gradient in gradients.items():
            if number not in small:
                self._large_sum(flat_in_memory(gradient), scale)
        for pack in bucket.packs:
            numbers = [number for number in pack.views if number in gradients]
            if not numbers:
                continue
            views, found = [pack.views[i] for i in numbers], [gradients[i] for i in numbers]
            if len(numbers) < len(pack.views):
                pack.flat.zero_()
            torch._foreach_copy_(views, found)
            self._measured_sum(pack.flat, scale)
            torch._foreach_copy_(found, views)

    def _sum_compressed(self, gradients: dict[int, Tensor], scale: float) -> None:
        """Reduce each gradient in its compressed form."""
        assert self.rule.compress is not None
        assert self.rule.decompress is not None
        for gradient in gradients.values():
            if self.own is not None:
                self.own.add(flat_in_memory(gradient))
            small, context = self.rule.compress(gradient)
            small = small.clone() if small.data_ptr() == gradient.data_ptr() else small
            self._scaled_sum(small.view(-1) if small.is_contiguous() else small, scale)
            gradient.copy_(self.rule.decompress(small, context))
            self._measure_mean(flat_in_memory(gradient))

    def _large_sum(self, flat: Tensor, scale: float) -> None:
        """Reduce one large gradient in its own memory.

        On one host norms are measured block by block while it is copied and added.
        """
        local = self.group.local
        if self.mean is None or not (
            flat.numel() and self._scales_on_the_way(flat) and _on_one_host(local)
        ):
            self._measured_sum(flat, scale)
            return
        assert isinstance(local, SharedMemoryTransport)
        call = call_of(describe("sum with norms", flat.dtype, flat.shape))
        local.carry_out(
            call, summing.large, flat, torch.add, call, True, scale, self.own, self.mean
        )

    def _measured_sum(self, flat: Tensor, scale: float) -> None:
        """Reduce a tensor; measure our own while it is scaled, and the result afterwards."""
        if self.own is not None:
            for block in torch.split(flat, _BLOCK):
                self.own.add(block)
                if flat.is_floating_point():
                    block.mul_(scale)
            scale = 1.0 if flat.is_floating_point() else scale
        self._scaled_sum(flat, scale)
        self._measure_mean(flat)

    def _measure_mean(self, flat: Tensor) -> None:
        """Add our slice of a result that all ranks have to the norm of the mean."""
        if self.mean is not None:
            self.mean.add(share_of(flat, self.group.rank(), self.group.size()))

    def _scales_on_the_way(self, tensor: Tensor) -> bool:
        """Return whether the sum also scales. The same on all ranks, whose scales may differ."""
        return (
            tensor.dtype in _EXACT
            and self.rule.kind == ReduceOp.SUM
            and tensor.device.type == "cpu"
        )

    def _scaled_sum(self, tensor: Tensor, scale: float) -> None:
        """Replace a tensor by the sum of the ranks' tensors, each times its scale."""
        kind = self.rule.kind
        # The same on all ranks, whose scales may differ.
        if tensor.dtype in _EXACT and kind == ReduceOp.SUM:
            self.group.sum_scaled(tensor, scale)
            return
        if scale != 1.0 and tensor.is_floating_point():
            tensor.mul_(scale)
        self._add_up(tensor, kind)
        if scale != 1.0 and not tensor.is_floating_point():
            tensor.copy_((tensor.double() * scale).trunc())


def _crosses_hosts(group: AllstepGroup) -> bool:
    return group.size() > 1 and not _on_one_host(group.local)


def _on_one_host(local: Transport | None) -> bool:
    return isinstance(local, SharedMemoryTransport) and local.crossing is None
