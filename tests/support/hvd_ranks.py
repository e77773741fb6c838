"""Inside a rank of the fixture `ranks`: hvd from init to shutdown.

    def work():
        with running() as (rank, size):
            hvd.allreduce(...)

`in_worlds` starts ranks once for many checks, since starting them is what takes time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import allstep.torch as hvd
from support.ranks import Ranks

Check = Callable[[int, int], None]


@contextmanager
def running(**options: Any) -> Iterator[tuple[int, int]]:
    """Our rank and the number of ranks.

    Nobody leaves before all have come to the end: whoever leaves stops the others.
    """
    hvd.init(**options)
    yield hvd.rank(), hvd.size()
    hvd.barrier()
    hvd.shutdown()


WORLDS = {"1": ["a"], "2": ["a", "a"], "3": ["a", "a", "a"], "3 on two hosts": ["a", "b", "a"]}
in_worlds = pytest.mark.parametrize("hosts", WORLDS.values(), ids=WORLDS)


def run_checks(ranks: Ranks, hosts: list[str], *checks: Check) -> None:
    """Each check is called with our rank and the number of ranks."""
    ranks(len(hosts), _call, checks, hosts=hosts, timeout=150)


def _call(checks: tuple[Check, ...]) -> None:
    with running() as (rank, size):
        for check in checks:
            check(rank, size)
