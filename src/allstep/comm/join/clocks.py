"""One clock for all hosts: the offset of our clock to rank 0's.

Processes on one kernel share a clock, whatever hosts the launcher counts. On each other kernel, the
first rank asks rank 0 for the time a few times, through the store, and uses the answer that arrived
soonest: rank 0 read its clock between the question and the answer, so the middle of that interval
is off by half of it at most. The other ranks on that kernel use the same result, because ranks that
share a clock must agree to the microsecond.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from allstep.comm.join.launcher_store import collect

_QUESTIONS = 10


class Offset(NamedTuple):
    """Nanoseconds to add to our clock to get rank 0's (`add`), and the maximum error of that."""

    add: int
    error: int


def offset_to_first(
    store: Store, rank: int, size: int, seconds: float, clock: Callable[[], int]
) -> Offset:
    """Return the offset of our clock to rank 0's.

    All ranks call it together; torch's error if one does not arrive within `seconds`. `clock`
    returns nanoseconds.
    """
    kernels = collect(store, "kernel", rank, size, _kernel(), seconds)
    first_ranks = [kernels.index(kernel) for kernel in dict.fromkeys(kernels)]
    ours = kernels.index(kernels[rank])
    if rank == 0:
        for asking in first_ranks[1:]:
            _answer(store, asking, seconds, clock)
    if rank == ours and rank != 0:
        store.set(f"offset/{rank}", json.dumps(_ask(store, rank, seconds, clock)))
    return (
        Offset(*json.loads(_get(store, f"offset/{ours}", seconds))) if ours != 0 else Offset(0, 0)
    )


def _kernel() -> str:
    """Return a text that is the same for processes that share a clock.

    That is the case for one boot and one time namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    time_namespace = Path("/proc/self/ns/time")
    return f"{boot} {time_namespace.readlink() if time_namespace.is_symlink() else ''}"


def _ask(store: Store, rank: int, seconds: float, clock: Callable[[], int]) -> Offset:
    found = []
    for k in range(_QUESTIONS):
        asked = clock()
        store.set(f"ask/{rank}/{k}", "")
        store.wait([f"answer/{rank}/{k}"], timedelta(seconds=seconds))
        answered = clock()
        theirs = int(store.get(f"answer/{rank}/{k}"))
        found.append(Offset(theirs - (asked + answered) // 2, (answered - asked + 1) // 2))
    return min(found, key=lambda offset: offset.error)


def _answer(store: Store, rank: int, seconds: float, clock: Callable[[], int]) -> None:
    for k in range(_QUESTIONS):
        store.wait([f"ask/{rank}/{k}"], timedelta(seconds=seconds))
        store.set(f"answer/{rank}/{k}", str(clock()))


def _get(store: Store, key: str, seconds: float) -> str:
    store.wait([key], timedelta(seconds=seconds))
    return store.get(key).decode()
