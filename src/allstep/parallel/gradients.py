"""The gradients of all ranks become one: their mean, their sum, or their mean by samples.

autograd puts a gradient wherever it likes, and a script may set it to None, replace it or lay it out otherwise at any time. So nothing
is attached to parameters here: `reduce` takes the gradients as it finds them, and leaves the result in the same place.

```
header      for each parameter: has this rank a gradient?  and: how many samples     one small sum, first (`header`)
large       each gradient by itself, where it lies                                   no copy
small       together, in one buffer that the ranks share                             copied in and out, all in one call
```

The header makes unused parameters right: one that no rank used keeps its None (so weight decay and momentum leave it alone, as on one
worker); one that only some ranks used counts as zero on the others. The layout (names, shapes, strides, in which order) is agreed once,
through the store; after that a step exchanges no names.

**Buckets.** Between hosts gradients travel while the rest is still being computed: parameters are cut into buckets, last layers first, and
`ready` starts the reduction of each bucket as soon as its gradients are there, in the agreed order, in a thread. On one host all cores are
busy computing, so there is one bucket, and it is reduced at the end by whoever waits: less waiting for each other, nothing lost.

**Norms**, if wanted, are taken on the way (`squares`): `norms` after `reduce` has them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp, _make_nccl_premul_sum
from torch.nn import Parameter

from allstep.comm.group.plan import call_of
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.group.shared_memory import LocalMover
from allstep.comm.memory import reduce as summing
from allstep.comm.op.describe import words
from allstep.comm.op.norms import NOTHING, GradientNorms, Squares, Wanted, share_of
from allstep.comm.op.queue import InLine, Queue
from allstep.comm.op.transport import Mover
from allstep.errors import UserError
from allstep.parallel.bucket_header import Header as Header
from allstep.parallel.bucket_header import absent_words, header_of, words_of
from allstep.parallel.pack import Pack, flat_in_memory, make_pack
from allstep.parallel.parameter_order import Named as Named
from allstep.parallel.parameter_order import agreed_order

LARGE = 1 << 20  # bytes from which on a gradient is reduced by itself, where it lies
BUCKET = 25 << 20  # bytes that travel together while the rest is still being computed
_BLOCK = 1 << 18  # elements that stay in the cache from one use to the next
_EXACT = (torch.float32, torch.float64)
_DRAIN_SECONDS = 2.0  # at the end: for reductions that have begun on all ranks

Compress = Callable[[Tensor], tuple[Tensor, Any]]
Decompress = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Rule:
    """What is computed. The sum over ranks of what each contributes, times `factor`; a mean divides by the ranks, or by samples.

    kind: torch's reduction. compress, decompress: what gradients are turned into before they travel, and back. densify: sparse gradients
    are made dense and reduced as such, and are named in `Gradients.densified`.
    """

    kind: Any = ReduceOp.SUM
    mean: bool = True
    factor: float = 1.0
    compress: Compress | None = None
    decompress: Decompress | None = None
    densify: bool = False


@dataclass
class Bucket:
    """Parameters whose gradients are reduced together, by number."""

    numbers: list[int]
    packs: list[Pack] = field(default_factory=list)
    missing: int = 0  # gradients that are not there yet


class Gradients:
    """The gradients of some parameters over a group. All ranks of the group make it, and call it, together.

    key: tells this set of parameters from others on the same group. overlap: whether buckets travel while others are computed;
    by default only where a network is between the ranks.
    """

    def __init__(
        self, group: AllstepGroup, key: str, named: Sequence[Named], rule: Rule, overlap: bool | None = None
    ) -> None:
        self.group = group
        self.key = key
        self.rule = rule
        self.named = list(named)
        self.overlap = _crosses_hosts(group) if overlap is None else overlap
        self._signature: tuple[Any, ...] = ()
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}  # by the id of the parameter
        self._agreements = 0
        self._queue = Queue()
        self._started: list[InLine] = []
        self._weight: float | None = None
        self._wanted = NOTHING
        self._absent = False
        self._sparse: list[Named] = []
        self._dense: set[int] = set()
        self._densified: list[Named] = []
        self.densified: list[Named] = []  # those of the last step that were sparse on some rank and are dense now
        self.used: set[int] = set()  # parameters, by number, for which some rank had a gradient in the last step
        self.present = group.size()  # ranks that took part in it
        self.own: Squares | None = None  # of our own gradients, while they are measured
        self.mean: Squares | None = None  # of our part of the result

    # A step

    def ready(self, parameter: Parameter, weight: float | None = None, wanted: Wanted = NOTHING) -> None:
        """The gradient of this parameter is complete. weight, wanted: as in `reduce`; the same in all calls of a step."""
        if not self.overlap or not self._buckets:
            return
        self._weight, self._wanted = weight, wanted
        bucket = self._bucket_of[id(parameter)]
        bucket.missing -= 1
        while len(self._started) < len(self._buckets) and self._buckets[len(self._started)].missing <= 0:
            self._start()

    def reduce(self, weight: float | None = None, absent: bool = False, wanted: Wanted = NOTHING) -> list[Named]:
        """Wait until every gradient is what the rule says. Returns those that are sparse on some rank: they are left to the caller.

        weight: the samples behind this rank's gradients, which are then taken for a mean over them; on all ranks or on none.
        absent: this rank has nothing to add and wants nothing; it takes part so that the others can go on.
        wanted: what `norms` shall know afterwards; alike on all ranks that are not absent.
        """
        if self._started and wanted != self._wanted:
            raise UserError(
                "measure_norms or clip_norm was changed after backward() had begun: gradients of this step are on their way already. Set "
                "them before it"
            )
        self._agree()
        self._weight, self._absent, self._wanted = weight, absent, wanted
        if self.overlap and not absent:
            self._finish()
        else:
            for bucket in self._buckets:
                self._reduce(bucket, absent)
        self.used, self._dense = self._dense, set()
        self.densified, self._densified = self._densified, []
        sparse, self._sparse = self._sparse, []
        return sparse

    def norms(self) -> GradientNorms | None:
        """Of the last `reduce`, if it measured them. All ranks call it together after each, also those that were absent."""
        if self.mean is None:
            return None
        size, rank = self.group.size(), self.group.rank()
        told = np.zeros(2 * size + 1)
        told[rank] = self.own.total() if self.own is not None else 0.0
        told[size + rank] = 0.0 if self._absent else 1.0 if self._weight is None else self._weight
        told[-1] = self.mean.total()
        self._all_reduce(torch.from_numpy(told), ReduceOp.SUM)
        own = tuple(told[:size].tolist()) if self.own is not None else ()
        self.own = self.mean = None
        return GradientNorms(own, tuple(told[size:-1].tolist()), float(told[-1]))

    def scale_by(self, factor: float) -> None:
        """Multiply what `reduce` left to us, but for sparse gradients."""
        gradients = self._to_scale()
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def _to_scale(self) -> list[Tensor]:
        return list(self._reduced().values())

    def _reduced(self) -> dict[int, Tensor]:
        """The dense gradients of the last step, by number."""
        found = {number: self.named[number].parameter.grad for number in sorted(self.used)}
        return {number: gradient.detach() for number, gradient in found.items() if gradient is not None}

    def _start(self) -> None:
        bucket = self._buckets[len(self._started)]
        self._started.append(self._queue.later(lambda: self._reduce(bucket), []))

    def _finish(self) -> None:
        while len(self._started) < len(self._buckets):
            self._start()
        started, self._started = self._started, []
        for bucket in self._buckets:
            bucket.missing = len(bucket.numbers)
        for work in started:
            work.wait()

    def close(self) -> None:
        """Drop what is under way, and end the thread.

        Reductions that have begun on all ranks may finish: Gloo cannot free a thread whose message has
        arrived in part. After `_DRAIN_SECONDS` those that wait for another rank fail, here and there.
        """
        end = time.monotonic() + _DRAIN_SECONDS
        while not self._is_drained() and time.monotonic() < end:
            time.sleep(0.002)
        if not self._is_drained():
            self.group.guard.fail(self.group.guard.own_end("dropped gradients that were being reduced"))
        self._queue.close()
        self._started, self._buckets, self._bucket_of = [], [], {}

    def _is_drained(self) -> bool:
        return all(work.is_completed() for work in self._started)

    # One bucket

    def _reduce(self, bucket: Bucket, absent: bool = False) -> None:
        with torch.no_grad():
            header = self._exchange_header(bucket, absent)
            scale = self._scale(header)
            used = [i for i, used in zip(bucket.numbers, header.dense, strict=True) if used]
            self._dense.update(used)
            gradients = {i: self._gradient(i, scale, absent) for i in used}
            if self.rule.compress is None:
                self._sum(bucket, gradients, scale)
            else:
                self._sum_compressed(gradients, scale)

    def _exchange_header(self, bucket: Bucket, absent: bool) -> Header:
        """Also gets ready to measure what the ranks want measured, which one that is absent learns here."""
        if absent:
            said = absent_words(len(bucket.numbers))
        else:
            gradients = [self.named[number].parameter.grad for number in bucket.numbers]
            said = words_of(gradients, self._weight, self._wanted)
        self._all_reduce(torch.from_numpy(said), ReduceOp.SUM)
        found = header_of(said, self.group.rank())
        self.present = found.present
        if found.wanted.own and self.own is None:
            self.own = Squares()
        if found.wanted.mean and self.mean is None:
            self.mean = Squares()
        return self._sort_out_sparse(bucket, found, absent) if any(found.sparse) else found

    def _sort_out_sparse(self, bucket: Bucket, header: Header, absent: bool) -> Header:
        """Those that are sparse on some rank are left out, or made dense on all."""
        sparse = [self.named[i] for i, is_sparse in zip(bucket.numbers, header.sparse, strict=True) if is_sparse]
        if not self.rule.densify:
            self._sparse += sparse
            return header
        for _, parameter in sparse:
            if not absent and parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        self._densified += sparse
        either = [dense or is_sparse for dense, is_sparse in zip(header.dense, header.sparse, strict=True)]
        return header._replace(dense=either)

    def _scale(self, header: Header) -> float:
        """By what our own gradients are multiplied before they are added."""
        if not self.rule.mean:
            return self.rule.factor
        if header.samples is not None:
            return self.rule.factor * (self._weight or 0.0) / max(header.samples, 1e-300)
        return self.rule.factor / self.group.size()

    def _gradient(self, number: int, scale: float, absent: bool) -> Tensor:
        """Our gradient, laid out as the parameter is; zeros where we have none or what we have does not count."""
        parameter = self.named[number].parameter
        if absent:
            return torch.zeros_like(parameter)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.stride() != parameter.stride() and parameter.numel() * parameter.element_size() >= LARGE:
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        gradient = parameter.grad.detach()
        return gradient if scale else gradient.zero_()  # nothing behind it: 0/0 of an empty batch must not spread

    def _sum(self, bucket: Bucket, gradients: dict[int, Tensor], scale: float) -> None:
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
        """Of one gradient, where it lies. On one host it is measured block by block as it is staged and added."""
        local = self.group.local
        if self.mean is None or not (flat.numel() and self._scales_on_the_way(flat) and _on_one_host(local)):
            self._measured_sum(flat, scale)
            return
        assert isinstance(local, LocalMover)
        call = call_of(words("sum with norms", flat.dtype, flat.shape))
        local.carry_out(call, summing.large, flat, torch.add, call, True, scale, self.own, self.mean)

    def _measured_sum(self, flat: Tensor, scale: float) -> None:
        """Our own is measured as it is scaled, the result afterwards."""
        if self.own is not None:
            for block in torch.split(flat, _BLOCK):
                self.own.add(block)
                if flat.is_floating_point():
                    block.mul_(scale)
            scale = 1.0 if flat.is_floating_point() else scale
        self._scaled_sum(flat, scale)
        self._measure_mean(flat)

    def _measure_mean(self, flat: Tensor) -> None:
        """Our part of a result that all ranks have."""
        if self.mean is not None:
            self.mean.add(share_of(flat, self.group.rank(), self.group.size()))

    def _scales_on_the_way(self, tensor: Tensor) -> bool:
        """Decided alike on all ranks, whose scales may differ."""
        return tensor.dtype in _EXACT and self.rule.kind == ReduceOp.SUM and tensor.device.type == "cpu"

    def _scaled_sum(self, tensor: Tensor, scale: float) -> None:
        """The sum of the ranks' tensors, each times its scale, in place."""
        kind = self.rule.kind
        if tensor.dtype in _EXACT and kind == ReduceOp.SUM:  # decided alike on all ranks, whose scales may differ
            self._all_reduce(tensor, _make_nccl_premul_sum(scale))
            return
        if scale != 1.0 and tensor.is_floating_point():
            tensor.mul_(scale)
        self._all_reduce(tensor, kind)
        if scale != 1.0 and not tensor.is_floating_point():
            tensor.copy_((tensor.double() * scale).trunc())

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        opts = AllreduceOptions()
        opts.reduceOp = op
        opts.asyncOp = False
        self.group.allreduce([tensor], opts).wait()

    # The layout

    def _agree(self) -> None:
        """Make sure that all ranks mean the same parameters. Costs a store's round trip when something changed, else a comparison."""
        if self._signature == self._described():
            return
        self._agreements += 1
        self.named = agreed_order(self.group, f"{self.key}/{self._agreements}", self.named)
        self._lay_out()
        self._signature = self._described()

    def _described(self) -> tuple[Any, ...]:
        """What the ranks agreed on, as it is now."""
        parameters = (each.parameter for each in self.named)
        return tuple((p.shape, p.stride(), p.dtype, p.device) for p in parameters)

    def _lay_out(self) -> None:
        self._buckets = [Bucket(numbers) for numbers in self._cut()]
        self._bucket_of = {
            id(self.named[number].parameter): bucket for bucket in self._buckets for number in bucket.numbers
        }
        for bucket in self._buckets:
            bucket.packs = self._make_packs(bucket)
            bucket.missing = len(bucket.numbers)

    def _cut(self) -> list[list[int]]:
        """The numbers of the parameters, bucket by bucket: the last layers, whose gradients are ready first, come first."""
        if not self.overlap:
            return [list(range(len(self.named)))]
        buckets: list[list[int]] = []
        room = 0
        for number in reversed(range(len(self.named))):
            nbytes = _nbytes(self.named[number].parameter)
            if nbytes > room:
                buckets.append([])
                room = BUCKET
            buckets[-1].append(number)
            room -= nbytes
        return buckets

    def _make_packs(self, bucket: Bucket) -> list[Pack]:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number in bucket.numbers:
            parameter = self.named[number].parameter
            if _nbytes(parameter) < LARGE and parameter.numel():
                kinds.setdefault((parameter.dtype, parameter.device), []).append(number)
        return [make_pack(self.group, self.named, numbers) for numbers in kinds.values()]


def _crosses_hosts(group: AllstepGroup) -> bool:
    return group.size() > 1 and not _on_one_host(group.local)


def _on_one_host(local: Mover | None) -> bool:
    return isinstance(local, LocalMover) and local.way is None


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
