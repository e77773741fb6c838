"""Fixtures that every test may use."""

import os

from hypothesis import settings

from hosts import two_hosts
from ranks import rank_server, ranks
from slurm import slurm, slurm_two_nodes

__all__ = ["rank_server", "ranks", "slurm", "slurm_two_nodes", "two_hosts"]

# Times on a shared machine say nothing; what must not hang has a time limit of its own.
settings.register_profile("test", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile("soak" if os.environ.get("ALLSTEP_SOAK") else "test")
