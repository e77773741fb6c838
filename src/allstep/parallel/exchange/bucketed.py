"""The step that `AllReduce` and `Owners` share: a header, then the sums of a bucket, then norms.

autograd allocates a gradient anywhere, and a script may set it to None, replace it or change its
layout at any time. So nothing is attached to parameters here: `reduce` uses the gradients as they
are, and leaves the result in the same place.

The header (one small sum, first) states for each parameter whether a rank has a gradient, and how
many samples are behind it. It handles unused parameters: one that no rank used keeps its None (so
weight decay and momentum do not touch it, as on one worker); one that only some ranks used counts
as zero on the others. The layout (names, shapes, strides and their order) is agreed once, through
the store; after that a step exchanges no names.

**Norms**, if wanted, are measured during the reduction (`comm.op.norms`); `norms` returns them
after `reduce`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp
from torch.nn import Parameter

from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.op.gradient_norms import NOTHING, GradientNorms, Squares, Wanted
from allstep.comm.op.queue import Queue, QueuedWork
from allstep.errors import UserError
from allstep.parallel.exchange.buckets import BUCKET, Bucket, cut, is_large
from allstep.parallel.exchange.exchange import Listener, Rule
from allstep.parallel.exchange.header import Header, absent_header, header_of, own_header
from allstep.parallel.exchange.parameter_order import Named, agreed_order

# At the end: seconds for reductions that have begun on all ranks.
_DRAIN_SECONDS = 2.0


class Bucketed(ABC):
    """The gradients of some parameters over a group. All ranks make it, and call it, together.

    `key`: distinguishes these parameters from others on the same group. `overlap`: whether buckets
    are reduced while other gradients are computed. `listener`: notified of each bucket.
    `limit`: bytes of a bucket if there are several.
    """

    def __init__(
        self,
        group: AllstepGroup,
        key: str,
        named: Sequence[Named],
        rule: Rule,
        *,
        overlap: bool,
        listener: Listener | None = None,
        limit: int = BUCKET,
    ) -> None:
        self.group, self.key, self.rule = group, key, rule
        self.named, self.limit = list(named), limit
        self.overlap, self.listener = overlap, listener
        self._signature: tuple[Any, ...] = ()
        self._buckets: list[Bucket] = []
        # By the id of the parameter.
        self._bucket_of: dict[int, Bucket] = {}
        self._agreements = 0
        self._queue = Queue()
        self._started: list[QueuedWork] = []
        self._weight: float | None = None
        self._wanted = NOTHING
        self._absent = False
        self._sparse: list[Named] = []
        self._dense: set[int] = set()
        self._densified: list[Named] = []
        self.densified: list[Named] = []
        self.used: set[int] = set()
        self.present = group.size()
        self.own: Squares | None = None
        self.mean: Squares | None = None

    # A step: see `exchange.Exchange`

    def ready(
        self, parameter: Parameter, weight: float | None = None, wanted: Wanted = NOTHING
    ) -> None:
        """Record that the gradient of this parameter is complete, and start buckets that are."""
        if not self.overlap or not self._buckets:
            return
        self._weight, self._wanted = weight, wanted
        bucket = self._bucket_of[id(parameter)]
        bucket.missing -= 1
        while (
            len(self._started) < len(self._buckets)
            and self._buckets[len(self._started)].missing <= 0
        ):
            self._start()

    def reduce(
        self, weight: float | None = None, absent: bool = False, wanted: Wanted = NOTHING
    ) -> list[Named]:
        """Wait until every gradient is reduced; return those that are sparse on some rank."""
        if self._started and wanted != self._wanted:
            raise UserError(
                "measure_norms or clip_norm was changed after backward() had begun: gradients of"
                " this step are already being reduced. Set them before backward()"
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
        """Return the norms of the last `reduce`, if it measured them."""
        if self.mean is None:
            return None
        size, rank = self.group.size(), self.group.rank()
        sums = np.zeros(2 * size + 1)
        sums[rank] = self.own.total() if self.own is not None else 0.0
        sums[size + rank] = 0.0 if self._absent else 1.0 if self._weight is None else self._weight
        sums[-1] = self.mean.total()
        self._add_up(torch.from_numpy(sums))
        own = tuple(sums[:size].tolist()) if self.own is not None else ()
        self.own = self.mean = None
        return GradientNorms(own, tuple(sums[size:-1].tolist()), float(sums[-1]))

    def scale_by(self, factor: float) -> None:
        """Multiply the results of `reduce` on this rank, except for sparse gradients."""
        found = {number: self.named[number].parameter.grad for number in sorted(self.used)}
        gradients = {
            number: gradient.detach() for number, gradient in found.items() if gradient is not None
        }
        if results := self._results(gradients):
            torch._foreach_mul_(results, factor)

    def close(self) -> None:
        """Drop reductions in progress, and end the thread.

        Reductions that have begun on all ranks may finish: Gloo cannot free a thread whose message
        has arrived in part. After `_DRAIN_SECONDS` those that wait for another rank fail on both
        ranks.
        """
        end = time.monotonic() + _DRAIN_SECONDS
        while not self._is_drained() and time.monotonic() < end:
            time.sleep(0.002)
        if not self._is_drained():
            self.group.guard.fail(
                self.group.guard.own_end("dropped gradients that were being reduced")
            )
        self._queue.close()
        self._started, self._buckets, self._bucket_of = [], [], {}

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

    def _is_drained(self) -> bool:
        return all(work.is_completed() for work in self._started)

    # Differs between the exchanges

    @abstractmethod
    def _sum(self, bucket: Bucket, gradients: dict[int, Tensor], scale: float) -> None:
        """Sum these gradients over the ranks, each first multiplied by our scale.

        Measures `own` and `mean` if they are wanted.
        """

    @abstractmethod
    def _results(self, gradients: dict[int, Tensor]) -> list[Tensor]:
        """Return the tensors of these reduced gradients that this rank uses."""

    @abstractmethod
    def _prepare(self) -> None:
        """Prepare what depends on the layout, which all ranks have agreed on."""

    def _more_flags(self) -> list[float]:
        """Return flags to add up with the header, always as many."""
        return []

    def _note_flags(self, sums: list[float]) -> None:  # noqa: B027
        """Take the sums of these flags over the ranks."""

    # One bucket

    def _reduce(self, bucket: Bucket, absent: bool = False) -> None:
        is_on = self.listener is not None and self.listener.is_listening()
        listener = self.listener if is_on else None
        began = time.monotonic_ns() if listener else 0
        with torch.no_grad():
            header = self._exchange_header(bucket, absent)
            agreed = time.monotonic_ns() if listener else 0
            scale = self._scale(header)
            used = [i for i, used in zip(bucket.numbers, header.dense, strict=True) if used]
            self._dense.update(used)
            self._sum(bucket, {i: self._gradient(i, scale, absent) for i in used}, scale)
        if listener:
            listener.reduced([self.named[i] for i in used], began, agreed, time.monotonic_ns())

    def _exchange_header(self, bucket: Bucket, absent: bool) -> Header:
        """Sum the headers of all ranks.

        Also prepares the measurements that the ranks want; an absent rank learns them here.
        """
        more, count = self._more_flags(), len(bucket.numbers)
        if absent:
            header = absent_header(count, more)
        else:
            gradients = [self.named[number].parameter.grad for number in bucket.numbers]
            header = own_header(gradients, self._weight, self._wanted, more)
        self._add_up(torch.from_numpy(header))
        found = header_of(header, count, self.group.rank())
        self._note_flags(found.more)
        self.present = found.present
        if found.wanted.own and self.own is None:
            self.own = Squares()
        if found.wanted.mean and self.mean is None:
            self.mean = Squares()
        return self._handle_sparse(bucket, found, absent) if any(found.sparse) else found

    def _handle_sparse(self, bucket: Bucket, header: Header, absent: bool) -> Header:
        """Exclude gradients that are sparse on some rank, or make them dense on all ranks."""
        sparse = [
            self.named[i]
            for i, is_sparse in zip(bucket.numbers, header.sparse, strict=True)
            if is_sparse
        ]
        if not self.rule.densify:
            self._sparse += sparse
            return header
        for _, parameter in sparse:
            if not absent and parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        self._densified += sparse
        either = [
            dense or is_sparse for dense, is_sparse in zip(header.dense, header.sparse, strict=True)
        ]
        return header._replace(dense=either)

    def _scale(self, header: Header) -> float:
        """Return the factor of our own gradients before they are added."""
        if not self.rule.mean:
            return self.rule.factor
        if header.samples is not None:
            return self.rule.factor * (self._weight or 0.0) / max(header.samples, 1e-300)
        return self.rule.factor / self.group.size()

    def _gradient(self, number: int, scale: float, absent: bool) -> Tensor:
        """Return our gradient in the parameter's layout; zeros if missing or without weight."""
        parameter = self.named[number].parameter
        if absent:
            return torch.zeros_like(parameter)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.stride() != parameter.stride() and self._needs_its_layout(parameter):
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        gradient = parameter.grad.detach()
        # A gradient of no samples may be 0/0, which must not spread.
        return gradient if scale else gradient.zero_()

    def _needs_its_layout(self, parameter: Parameter) -> bool:
        """Return whether a gradient is reduced in its own memory and needs the common layout."""
        return is_large(parameter)

    def _add_up(self, tensor: Tensor, kind: Any = ReduceOp.SUM) -> None:
        opts = AllreduceOptions()
        opts.reduceOp = kind
        opts.asyncOp = False
        self.group.allreduce([tensor], opts).wait()

    # The layout

    def _agree(self) -> None:
        """Make sure that all ranks have the same parameters.

        Costs a round trip to the store after a change, else a comparison.
        """
        if self._signature == self._described():
            return
        self._agreements += 1
        self.named = agreed_order(self.group, f"{self.key}/{self._agreements}", self.named)
        self._buckets = cut(self.named, self.overlap, self.limit)
        self._bucket_of = {
            id(self.named[number].parameter): bucket
            for bucket in self._buckets
            for number in bucket.numbers
        }
        for bucket in self._buckets:
            bucket.missing = len(bucket.numbers)
        self._prepare()
        self._signature = self._described()

    def _described(self) -> tuple[Any, ...]:
        """Return the current layout, for comparison with the one that the ranks agreed on."""
        parameters = (each.parameter for each in self.named)
        return tuple((p.shape, p.stride(), p.dtype, p.device) for p in parameters)
