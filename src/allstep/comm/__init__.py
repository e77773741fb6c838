"""Ranks that work together: how they meet, and what they compute in common."""

from allstep.comm.start import init, shutdown

__all__ = ["init", "shutdown"]
