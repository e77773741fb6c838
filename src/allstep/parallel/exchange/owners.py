"""`Owners`: each rank of a host gets the sums of the gradients that it updates, and of no others.

```
gradients   | conv1 | conv2 |        fc1        | fc2 |      every rank has all of its own
            |<------ rank 0 ------>|<------ rank 1 ------>|  each owner gets the sums of its pieces
```

Gradients of what others own are delivered to them in shared memory (`to_owners`); with several
hosts the sums of a piece then cross to its owners there. It is the first half of an all-reduce: the
weights are shared (`shared_parameters`), so no rank needs the second.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from allstep.comm.group.plan import call_of
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.group.shared_memory import SharedMemoryTransport
from allstep.comm.op.norms import share_of
from allstep.errors import CommError
from allstep.parallel.exchange.bucketed import Bucketed
from allstep.parallel.exchange.buckets import Bucket, is_large
from allstep.parallel.exchange.exchange import Listener, Rule
from allstep.parallel.exchange.ownership import Piece, by_elements, by_whole_parameters
from allstep.parallel.exchange.pack import flat_in_memory
from allstep.parallel.exchange.parameter_order import Named
from allstep.parallel.exchange.to_owners import Schedule, deliver


class Owners(Bucketed):
    """Leaves in each rank's gradients the sums of the pieces that it owns; the rest of them means
    nothing afterwards.

    whole: give owners whole parameters, for optimizers that look at more than one element at a
    time. listener: hears of each step.
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
                "share_weights needs ranks that can share memory; `allstep doctor` says why they"
                " cannot",
                rank=group.rank(),
            )
        self.local = local
        self._whole = whole
        self._call = call_of(f"shared weights {key}")
        self._agree()

    def meet(self) -> None:
        """All ranks of the host are here, and see what the others have written."""
        self.local.carry_out(self._call, lambda arena: arena.barrier(self._call))

    @property
    def own_pieces(self) -> list[Piece]:
        """What this rank updates."""
        rank = self.local.arena.rank
        return self.owned[rank] if rank < len(self.owned) else []

    def _prepare(self) -> None:
        arena = self.local.arena
        sizes = [each.parameter.numel() for each in self.named]
        deal = by_whole_parameters if self._whole else by_elements
        self.owned: list[list[Piece]] = deal(sizes, self.local.layout.num_lanes or arena.size)
        dtypes = dict.fromkeys(each.parameter.dtype for each in self.named)
        self._schedules = {dtype: Schedule(arena, self._owned_of(dtype), dtype) for dtype in dtypes}

    def _owned_of(self, dtype: torch.dtype) -> list[list[Piece]]:
        return [
            [piece for piece in share if self.named[piece.number].parameter.dtype == dtype]
            for share in self.owned
        ]

    def _needs_its_layout(self, parameter: Parameter) -> bool:
        return True

    def _results(self, gradients: dict[int, Tensor]) -> list[Tensor]:
        return self._pieces_of(gradients)

    def _sum(self, bucket: Bucket, gradients: dict[int, Tensor], scale: float) -> None:
        for dtype, schedule in self._schedules.items():
            flats = {
                number: flat_in_memory(gradient)
                for number, gradient in gradients.items()
                if gradient.dtype == dtype
            }
            mean = (
                self.mean if self.local.crossing is None else None
            )  # over several hosts it is not yet the mean
            self.local.carry_out(
                self._call, deliver, schedule, flats, scale, self._call, self.own, mean
            )
        self._cross(gradients)

    def _cross(self, gradients: dict[int, Tensor]) -> None:
        """Sums of our pieces over all hosts: large ones where they lie, small ones together."""
        if self.local.crossing is None:
            return
        small: dict[torch.dtype, list[Tensor]] = {}
        for piece in self._pieces_of(gradients):
            if is_large(piece):
                self._carry(piece)
            else:
                small.setdefault(piece.dtype, []).append(piece)
        for together in small.values():
            packed = torch.cat(together)
            self._carry(packed)
            torch._foreach_copy_(
                together, torch.split_with_sizes(packed, [piece.numel() for piece in together])
            )

    def _pieces_of(self, gradients: Mapping[int, Tensor]) -> list[Tensor]:
        """What we own of these gradients, flat."""
        return [
            flat_in_memory(gradients[number])[start:end]
            for number, start, end in self.own_pieces
            if number in gradients
        ]

    def _carry(self, flat: Tensor) -> None:
        self.local.carry_out(self._call, lambda _: self._cross_with(flat))
        if self.mean is not None:  # every host has it
            self.mean.add(share_of(flat, self.local.layout.host, len(self.local.layout.hosts)))

    def _cross_with(self, flat: Tensor) -> None:
        assert self.local.crossing is not None
        self.local.crossing.get_ready()
        self.local.crossing.carry(flat, torch.add)
