"""Fixtures that every test may use."""

from hosts import two_hosts
from ranks import rank_server, ranks
from slurm import slurm, slurm_two_nodes

__all__ = ["rank_server", "ranks", "slurm", "slurm_two_nodes", "two_hosts"]
