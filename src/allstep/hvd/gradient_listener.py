"""The gradients of `DistributedOptimizer` in Horovod's timeline.

They do not pass through the engine, so its hooks do not see them. The exchange tells a listener of
each bucket: when its reduction began, when the ranks had agreed on what there is to reduce (the
header), and when it was over. Each parameter that was reduced gets a row under the name that
Horovod would give it.
"""

from collections.abc import Sequence

from allstep.hvd import timeline
from allstep.parallel.exchange import Named


class TimelineListener:
    """Hears of reduced gradients while there is a timeline."""

    def is_listening(self) -> bool:
        """Whether a timeline is being written."""
        return timeline.current() is not None

    def reduced(self, named: Sequence[Named], began: int, agreed: int, ended: int) -> None:
        """Show these parameters."""
        trace = timeline.current()
        if trace is not None:
            trace.gradients(named, began, agreed, ended)
