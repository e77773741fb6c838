"""The number of the rendezvous that a process joins, if several programs share a store.

    allstep run -np 2 sh -c "python train.py; python evaluate.py"

The store outlives the first program, and so do its keys. Each rank therefore counts its joins in
the store: the n-th time that a rank joins, in whichever process, it takes the n-th rendezvous.

Two programs at once (`a.py & b.py`, or a process that forks and joins in both halves) would join
each other at random and add up each other's numbers. So each process writes its pid, and clears it
when it leaves; a second process that finds the first one still running is refused. A rank whose
first program ended before it joined joins the others with its second program. Ranks of different
programs are permitted, but rank 0 prints a notice (`differing_programs`).
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

from torch._C._distributed_c10d import Store

from allstep.errors import WorldError
from allstep.process.liveness import birth, namespace
from allstep.wire.keys import failure_of
from allstep.world import World

_MAX_LENGTH = 200
_TIMEOUT, _NAP = 5.0, 0.05
_ARGUMENT = re.compile(r"[\w.]+")


def attend(store: Store, world: World) -> int:
    """Return the number of this rank's next rendezvous, from 1.

    Raises WorldError if another process of this rank has joined and still runs.
    """
    number = int(store.add(f"allstep/joins/{world.rank}", 1))
    store.set(_key(world, number), json.dumps([namespace(), os.getpid(), birth(os.getpid())]))
    # A process that was killed between the two lines above has written nothing.
    if number > 1 and store.check([_key(world, number - 1)]):
        _wait_until_gone(world, lambda: store.get(_key(world, number - 1)))
    if number > 1:
        # The launcher must not take the failure of an earlier program for the one of this.
        store.delete_key(failure_of(world.rank))
    return number


def leave(store: Store, world: World, number: int) -> None:
    """Clear our pid in rendezvous `number`: another process may join as this rank."""
    # The store may be lost.
    with contextlib.suppress(RuntimeError, OSError):
        store.set(_key(world, number), "")


def program() -> str:
    """Return the command of this process, for its card."""
    return " ".join(sys.argv)[:_MAX_LENGTH]


def differing_programs(programs: Sequence[str], local_ranks: Sequence[int]) -> str | None:
    """Return a notice if ranks run different programs, else None.

    `programs` and `local_ranks` are those of all ranks, in order. Programs may differ in their own
    rank (`--local_rank=3`).
    """
    for rank, other in enumerate(programs):
        if not _are_alike(
            programs[0], {"0", str(local_ranks[0])}, other, {str(rank), str(local_ranks[rank])}
        ):
            return (
                f"rank 0 runs `{programs[0]}`, rank {rank} `{other}`: if these are two programs of"
                " one launch, the first has ended on one of them before it joined, and the results"
                " belong to neither program"
            )
    return None


def _are_alike(ours: str, our_numbers: set[str], theirs: str, their_numbers: set[str]) -> bool:
    pairs = zip_longest(_ARGUMENT.findall(ours), _ARGUMENT.findall(theirs))
    return all(one == two or (one in our_numbers and two in their_numbers) for one, two in pairs)


def _key(world: World, number: int) -> str:
    return f"allstep/joins/{world.rank}/{number}"


def _wait_until_gone(world: World, left: Callable[[], bytes]) -> None:
    """Wait until the previous process of this rank has left, and raise if it does not."""
    end = time.monotonic() + _TIMEOUT
    while (pid := _who_is_there(left())) is not None:
        time.sleep(_NAP)
        if time.monotonic() < end:
            continue
        raise WorldError(
            f"rank {world.rank} has joined already, as process {pid}, which still runs; this is"
            f" process {os.getpid()}. Two programs of one launch cannot be one rank at the same"
            " time: let one end first, or launch them apart"
        )


def _who_is_there(left: bytes) -> int | None:
    """Return the pid that is written in `left` if that process still runs and is not ours."""
    if not left:
        return None
    where, pid, born = json.loads(left)
    is_other = where == namespace() and pid != os.getpid() and birth(pid) == born
    return int(pid) if is_other else None
