"""Inside a rank of the fixture `ranks`: hvd from init to shutdown.

def work():
    with running() as (rank, size):
        hvd.allreduce(...)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import allstep.torch as hvd


@contextmanager
def running(**options: Any) -> Iterator[tuple[int, int]]:
    """Our rank and the number of ranks. Nobody leaves before all have come to the end: whoever leaves stops the others."""
    hvd.init(**options)
    yield hvd.rank(), hvd.size()
    hvd.barrier()
    hvd.shutdown()
