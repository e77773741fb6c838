"""`CompressedOwners`: as `Owners`, but what crosses hosts is encoded, with error feedback.

```
within a host    gradients are added in shared memory, exactly; each owner has the sum of its range
between hosts    residual += sum;  every owner sends encode(residual) to those of its range on the
                 other hosts;  residual -= decode(what was sent)
                 total = what the hosts have sent, decoded, added in the order of hosts
```

All hosts decode the same bytes in the same order, their own included, so their weights stay equal.
Encoded sums cannot be added on the way, so each host receives those of all others: with h hosts
(h - 1) n / c bytes for a codec with factor c, against 2 (h - 1) / h n for plain sums. It saves
bytes where h < 2 c: with bf16 on 2 and 3 hosts, with 2bit on up to 31.

The residual belongs to the owner and its range. It is lost with the exchange: at the end of a run,
and when an elastic run continues with other hosts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.op.gradient_norms import share_of
from allstep.compression import Codec, ErrorFeedback, add_decoded, decode, encoded_nbytes
from allstep.parallel.exchange.exchange import Listener, Rule
from allstep.parallel.exchange.owner_ranges import ParameterRange
from allstep.parallel.exchange.owners import Owners
from allstep.parallel.exchange.packed_gradients import flat_in_memory
from allstep.parallel.exchange.parameter_order import Named


class CompressedOwners(Owners):
    """Leaves the sums of its own ranges, as the codec transmits them, in each rank's gradients.

    `codec`: encodes float32; sums of other types cross whole. The rest: as for `Owners`.
    """

    def __init__(
        self,
        group: AllstepGroup,
        key: str,
        named: Sequence[Named],
        rule: Rule,
        whole: bool,
        codec: Codec,
        listener: Listener | None = None,
    ) -> None:
        self._codec = codec
        # What this rank has not sent of its ranges yet.
        self._residuals: dict[ParameterRange, Tensor] = {}
        super().__init__(group, key, named, rule, whole, listener)

    def _sum_over_hosts(self, gradients: dict[int, Tensor]) -> None:
        crossing = self.local.crossing
        if crossing is None:
            return
        encoded = {n: each for n, each in gradients.items() if each.dtype is torch.float32}
        rest = {n: each for n, each in gradients.items() if n not in encoded}
        super()._sum_over_hosts(rest)
        spans = [span for span in self.own_ranges if span.number in encoded]
        if not spans:
            return
        own = [flat_in_memory(encoded[n])[start:end] for n, start, end in spans]
        total = torch.cat(own)
        self._exchange(total, spans)
        torch._foreach_copy_(own, torch.split_with_sizes(total, [each.numel() for each in own]))
        if self.mean is not None:
            layout = self.local.layout
            self.mean.add(share_of(total, layout.host, len(layout.hosts)))

    def _exchange(self, total: Tensor, spans: Sequence[ParameterRange]) -> None:
        """Replace the sum of our host by the total of what all hosts send."""
        layout, crossing = self.local.layout, self.local.crossing
        assert crossing is not None
        nbytes = encoded_nbytes(self._codec, total.numel())
        sent = [torch.empty(nbytes, dtype=torch.uint8) for _ in layout.hosts]
        self._encode(total, spans, sent[layout.host])
        parts = [[each] for each in sent]
        self.local.carry_out(self._call, lambda _: crossing.from_owners(parts))
        first, *others = sent
        decode(self._codec, first, total)
        for other in others:
            add_decoded(self._codec, other, total)

    def _encode(self, total: Tensor, spans: Sequence[ParameterRange], out: Tensor) -> None:
        """Encode ranges and what is left of earlier ones; keep the rest."""
        sizes = [end - start for _, start, end in spans]
        kept = [
            self._residuals.get(span, torch.zeros(size))
            for span, size in zip(spans, sizes, strict=True)
        ]
        feedback = ErrorFeedback(self._codec, torch.cat(kept))
        feedback.encode(total, out)
        assert feedback.residual is not None
        left = torch.split_with_sizes(feedback.residual, sizes)
        # Views of one tensor: nothing else uses it.
        self._residuals.update(zip(spans, left, strict=True))
