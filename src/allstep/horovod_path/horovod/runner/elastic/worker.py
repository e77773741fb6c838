"""The kinds of change of a run's hosts."""

from allstep.hvd.elastic import HostUpdateResult

__all__ = ["HostUpdateResult"]
