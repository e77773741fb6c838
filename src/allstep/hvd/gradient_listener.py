"""The gradients of `DistributedOptimizer` in Horovod's timeline.

They bypass the engine, so its hooks do not see them. The exchange notifies a listener of each
bucket: when its reduction began, when the ranks had agreed on what to reduce (the header), and when
it ended. Each reduced parameter gets a row under the name that Horovod would give it.
"""

from collections.abc import Sequence

from allstep.hvd import timeline
from allstep.parallel.exchange import Named


class TimelineListener:
    """Adds reduced gradients to the timeline, if there is one."""

    def is_listening(self) -> bool:
        """Return whether a timeline is being written."""
        return timeline.current() is not None

    def reduced(self, named: Sequence[Named], began: int, agreed: int, ended: int) -> None:
        """Add these parameters to the timeline; times in nanoseconds (monotonic)."""
        trace = timeline.current()
        if trace is not None:
            trace.gradients(named, began, agreed, ended)
