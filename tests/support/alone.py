"""A world of one worker, in a rank of a test that has left its world.

Starting a process and importing a framework is what takes time, so checks for one worker run in the
process of a rank after `hvd.shutdown()`, as in a script that was started without a launcher.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def world_of_one(hvd: Any) -> Iterator[None]:
    """Initialize `hvd` for this process alone in the block."""
    before = os.environ.get("ALLSTEP_LAUNCHER")
    os.environ["ALLSTEP_LAUNCHER"] = "none"
    try:
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (0, 1)
        yield
        hvd.shutdown()
    finally:
        del os.environ["ALLSTEP_LAUNCHER"]
        if before is not None:
            os.environ["ALLSTEP_LAUNCHER"] = before
