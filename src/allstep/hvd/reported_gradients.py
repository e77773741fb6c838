"""The gradients of `DistributedOptimizer` in Horovod's timeline.

They do not pass through the engine, so its hooks do not see them. Here each bucket tells, while there is a timeline, when its reduction
began, when the ranks had agreed on what there is to reduce (the header), and when it was over. Each parameter that was reduced gets a
row under the name that Horovod would give it.
"""

import time

from allstep.hvd import timeline
from allstep.parallel.gradients import Bucket, Gradients, Header


class ReportedGradients(Gradients):
    """Gradients that a timeline shows."""

    _header: Header
    _agreed = 0  # when the last header was complete

    def _reduce(self, bucket: Bucket, absent: bool = False) -> None:
        trace = timeline.current()
        if trace is None:
            super()._reduce(bucket, absent)
            return
        began = time.monotonic_ns()
        super()._reduce(bucket, absent)
        reduced = [self.named[i] for i, used in zip(bucket.numbers, self._header.dense, strict=True) if used]
        trace.gradients(reduced, began, self._agreed, time.monotonic_ns())

    def _exchange_header(self, bucket: Bucket, absent: bool) -> Header:
        self._header = super()._exchange_header(bucket, absent)
        self._agreed = time.monotonic_ns()
        return self._header
