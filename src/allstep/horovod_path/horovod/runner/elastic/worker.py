"""How the hosts of a run may change."""

from allstep.hvd.elastic import HostUpdateResult

__all__ = ["HostUpdateResult"]
