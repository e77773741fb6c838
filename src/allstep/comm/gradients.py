"""The gradients of all ranks become one: their mean, their sum, or their mean by samples.

autograd puts a gradient wherever it likes, and a script may set it to None, replace it or lay it out otherwise at any time. So nothing
is attached to parameters here: `reduce` takes the gradients as it finds them, and leaves the result in the same place.

```
header      for each parameter: has this rank a gradient?  and: how many samples     one small sum, first
large       each gradient by itself, where it lies                                   no copy
small       together, in one buffer that the ranks share                             copied in and out, all in one call
```

The header makes unused parameters right: one that no rank used keeps its None (so weight decay and momentum leave it alone, as on one
worker); one that only some ranks used counts as zero on the others. The layout (names, shapes, strides, in which order) is agreed once,
through the store; after that a step exchanges no names.

**Buckets.** Between hosts gradients travel while the rest is still being computed: parameters are cut into buckets, last layers first, and
`ready` starts the reduction of each bucket as soon as its gradients are there, in the agreed order, in a thread. On one host all cores are
busy computing, so there is one bucket, and it is reduced at the end by whoever waits: less waiting for each other, nothing lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp, _make_nccl_premul_sum
from torch.nn import Parameter

from allstep.comm.agreement import Named as Named
from allstep.comm.agreement import agreed_order
from allstep.comm.group import AllstepGroup
from allstep.comm.local import LocalMover
from allstep.comm.queue import InLine, Queue
from allstep.comm.shared import shared_empty
from allstep.errors import CollectiveMismatch

LARGE = 1 << 20  # bytes from which on a gradient is reduced by itself, where it lies
BUCKET = 25 << 20  # bytes that travel together while the rest is still being computed
_SPARSE = float(1 << 20)  # in the header: a sparse gradient; sums of up to a million ranks stay apart
_EXACT = (torch.float32, torch.float64)

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


class Header(NamedTuple):
    """What all ranks together say of a bucket."""

    dense: list[bool]  # by parameter: whether some rank has a gradient
    sparse: list[bool]
    scale: float  # by which our own gradients are multiplied before they are added


@dataclass
class Pack:
    """Small gradients of one kind that travel together."""

    flat: Tensor
    views: dict[int, Tensor]  # by the number of the parameter


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
        self._sparse: list[Named] = []
        self._dense: set[int] = set()
        self._densified: list[Named] = []
        self.densified: list[Named] = []  # those of the last step that were sparse on some rank and are dense now
        self.used: set[int] = set()  # parameters, by number, for which some rank had a gradient in the last step

    # A step

    def ready(self, parameter: Parameter, weight: float | None = None) -> None:
        """The gradient of this parameter is complete. weight: as in `reduce`; the same in all calls of a step."""
        if not self.overlap or not self._buckets:
            return
        self._weight = weight
        bucket = self._bucket_of[id(parameter)]
        bucket.missing -= 1
        while len(self._started) < len(self._buckets) and self._buckets[len(self._started)].missing <= 0:
            self._start()

    def reduce(self, weight: float | None = None, absent: bool = False) -> list[Named]:
        """Wait until every gradient is what the rule says. Returns those that are sparse on some rank: they are left to the caller.

        weight: the samples behind this rank's gradients, which are then taken for a mean over them; on all ranks or on none.
        absent: this rank has nothing to add and wants nothing; it takes part so that the others can go on.
        """
        self._agree()
        self._weight = weight
        if absent:
            for bucket in self._buckets:
                self._reduce(bucket, absent=True)
        elif self.overlap:
            self._finish()
        else:
            for bucket in self._buckets:
                self._reduce(bucket)
        self.used, self._dense = self._dense, set()
        self.densified, self._densified = self._densified, []
        sparse, self._sparse = self._sparse, []
        return sparse

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

    # One bucket

    def _reduce(self, bucket: Bucket, absent: bool = False) -> None:
        with torch.no_grad():
            header = self._exchange_header(bucket, absent)
            used = [i for i, used in zip(bucket.numbers, header.dense, strict=True) if used]
            self._dense.update(used)
            gradients = {i: self._gradient(i, header.scale, absent) for i in used}
            if self.rule.compress is None:
                self._sum(bucket, gradients, header.scale)
            else:
                self._sum_compressed(gradients, header.scale)

    def _exchange_header(self, bucket: Bucket, absent: bool) -> Header:
        """One small sum: flags of the parameters, ranks that are present, ranks that told their samples, samples."""
        count = len(bucket.numbers)
        words = [0.0] * (count + 3)
        if not absent:
            for place, number in enumerate(bucket.numbers):
                gradient = self.named[number].parameter.grad
                if gradient is not None:
                    words[place] = _SPARSE if gradient.is_sparse else 1.0
            words[count:] = [1.0, 0.0 if self._weight is None else 1.0, float(self._weight or 0.0)]
        summed = np.array(words)  # torch.tensor takes more than twice as long for a list
        self._all_reduce(torch.from_numpy(summed), ReduceOp.SUM)
        *flags, present, told, samples = summed.tolist()
        if told and told != present:
            raise CollectiveMismatch(
                f"{told:.0f} of {present:.0f} ranks told how many samples are behind their gradients: tell it on all or on none",
                rank=self.group.rank(),
                op="gradients",
            )
        sparse = [flag >= _SPARSE for flag in flags]
        dense = [bool(flag) and not is_sparse for flag, is_sparse in zip(flags, sparse, strict=True)]
        header = Header(dense, sparse, self._scale(bool(told), samples))
        return self._sort_out_sparse(bucket, header, absent) if any(sparse) else header

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

    def _scale(self, by_samples: bool, samples: float) -> float:
        if not self.rule.mean:
            return self.rule.factor
        if by_samples:
            return self.rule.factor * (self._weight or 0.0) / max(samples, 1e-300)
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
                self._scaled_sum(flat_in_memory(gradient), scale)
        for pack in bucket.packs:
            numbers = [number for number in pack.views if number in gradients]
            if not numbers:
                continue
            views, found = [pack.views[i] for i in numbers], [gradients[i] for i in numbers]
            if len(numbers) < len(pack.views):
                pack.flat.zero_()
            torch._foreach_copy_(views, found)
            self._scaled_sum(pack.flat, scale)
            torch._foreach_copy_(found, views)

    def _sum_compressed(self, gradients: dict[int, Tensor], scale: float) -> None:
        assert self.rule.compress is not None
        assert self.rule.decompress is not None
        for gradient in gradients.values():
            small, context = self.rule.compress(gradient)
            small = small.clone() if small.data_ptr() == gradient.data_ptr() else small
            self._scaled_sum(small.view(-1) if small.is_contiguous() else small, scale)
            gradient.copy_(self.rule.decompress(small, context))

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
        return [self._make_pack(numbers, dtype, device) for (dtype, device), numbers in kinds.items()]

    def _make_pack(self, numbers: list[int], dtype: torch.dtype, device: torch.device) -> Pack:
        shapes = [self.named[number].parameter for number in numbers]
        total = sum(parameter.numel() for parameter in shapes)
        real = torch.view_as_real(torch.empty(0, dtype=dtype)).dtype if dtype.is_complex else dtype
        count = total * (2 if dtype.is_complex else 1)
        flat = shared_empty(count, real, self.group) if device.type == "cpu" else torch.empty(count, device=device)
        whole = torch.view_as_complex(flat.view(-1, 2)) if dtype.is_complex else flat
        views, start = {}, 0
        for number, parameter in zip(numbers, shapes, strict=True):
            views[number] = whole.as_strided(parameter.shape, dense_strides(parameter), start)
            start += parameter.numel()
        return Pack(flat, views)


def _crosses_hosts(group: AllstepGroup) -> bool:
    local = group.local
    return group.size() > 1 and not (isinstance(local, LocalMover) and local.way is None)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Those of a new tensor like it: its own, if it fills its memory without gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def flat_in_memory(gradient: Tensor) -> Tensor:
    """The elements as they lie in memory: they lie as on the other ranks, so their order does not matter."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if gradient.is_contiguous():
        return gradient.view(-1)
    return gradient.as_strided((gradient.numel(),), (1,))
