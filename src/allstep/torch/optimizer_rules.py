"""From the arguments of `DistributedOptimizer` to the rules of `parallel`."""

import os
from typing import Any

import torch
from torch._C._distributed_c10d import ReduceOp
from torch.optim import Optimizer

from allstep.hvd.requests import REDUCTIONS
from allstep.parallel.exchange import Rule
from allstep.parallel.updates import ByOwners
from allstep.torch.compression import Compression
from allstep.torch.mpi_ops import Average, Sum


def rule_for(op: int, compression: Any, densify: bool) -> Rule:
    """Return how gradients are reduced; `densify`: sparse ones as dense ones."""
    compressed = compression is not Compression.none
    return Rule(
        kind=REDUCTIONS.get(op, ReduceOp.SUM),
        mean=op == Average,
        compress=compression.compress if compressed else None,
        decompress=compression.decompress if compressed else None,
        densify=densify,
    )


def in_elastic_run() -> bool:
    """Return whether the world of this run may change."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def by_owners(optimizer: Optimizer, op: int, compression: Any) -> ByOwners:
    """Return the update with one copy of the weights per host; ValueError if it is impossible."""
    if in_elastic_run():
        raise ValueError(
            "share_weights=True does not work in an elastic run: a rank that is lost during an"
            " update leaves the shared weights half new; leave share_weights out"
        )
    if op not in (Average, Sum) or compression is not Compression.none:
        raise ValueError(
            "share_weights works with op=hvd.Average or hvd.Sum and without compression: only"
            " these are reduced in shared memory"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "share_weights does not work with LBFGS, which updates all parameters as one vector"
        )
    return ByOwners(type(optimizer))
