"""One clock for all hosts: how far ours is from rank 0's.

Processes on one kernel share a clock, whatever hosts the launcher sees. Of the ranks on another
kernel the first asks rank 0 for the time a few times, through the store, and believes the answer
that came back soonest: rank 0 read its clock somewhere between the question and the answer, so the
middle is off by half of that time at most. The others on that kernel take over its result: ranks
that share a clock must stay in step to the microsecond.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from allstep.comm.join.store import collect

_QUESTIONS = 10


class Offset(NamedTuple):
    """Nanoseconds: what to add to our clock to get rank 0's, and by how much that may be wrong."""

    add: int
    error: int


def offset_to_first(
    store: Store, rank: int, size: int, seconds: float, clock: Callable[[], int]
) -> Offset:
    """Ours.

    All ranks call it together; torch's error when one does not come within so many seconds.
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
    """The same for processes that share a clock: those of one boot, but for containers with a time
    of their own."""
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
