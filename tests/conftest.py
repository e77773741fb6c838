"""Fixtures that every test may use."""

from ranks import rank_server, ranks

__all__ = ["rank_server", "ranks"]
