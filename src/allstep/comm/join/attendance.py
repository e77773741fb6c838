"""Which meeting a process comes to, when several programs of one launch share a store.

    allstep run -np 2 sh -c "python train.py; python evaluate.py"

The store outlives the first program, and so do its keys. Each rank therefore counts its meetings
in the store: the n-th time that it joins, in whichever process, it meets the others at their n-th.

Two programs at once (`a.py & b.py`, or a process that forks and joins in both halves) would meet at
random and add up each other's numbers. So each process leaves its pid, and takes it back when it
leaves; a second one that finds the first still there is refused. A rank whose first program ended
before it joined meets the others with its second: nothing forbids ranks of different programs, but
rank 0 tells that they are (`differing_programs`).
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
    """Return the number of the next meeting of this rank, from 1.

    WorldError when another process is at it.
    """
    number = int(store.add(f"allstep/joins/{world.rank}", 1))
    store.set(_key(world, number), json.dumps([namespace(), os.getpid(), birth(os.getpid())]))
    # A process that was killed between the two lines above has left nothing.
    if number > 1 and store.check([_key(world, number - 1)]):
        _wait_until_gone(world, lambda: store.get(_key(world, number - 1)))
    if number > 1:
        # That of a program before: the launcher must not take it for the reason of this one.
        store.delete_key(failure_of(world.rank))
    return number


def leave(store: Store, world: World, number: int) -> None:
    """Tell that this process is through with meeting `number`: another one may join as this rank."""
    with contextlib.suppress(RuntimeError, OSError):  # the store may be gone
        store.set(_key(world, number), "")


def program() -> str:
    """Return what this process runs, as the others are told."""
    return " ".join(sys.argv)[:_MAX_LENGTH]


def differing_programs(programs: Sequence[str], local_ranks: Sequence[int]) -> str | None:
    """Return a line about ranks that run different programs; each may name its own rank
    (`--local_rank=3`).

    programs, local_ranks: of all ranks, in their order.
    """
    for rank, other in enumerate(programs):
        if not _are_alike(
            programs[0], {"0", str(local_ranks[0])}, other, {str(rank), str(local_ranks[rank])}
        ):
            return (
                f"rank 0 runs `{programs[0]}`, rank {rank} `{other}`: if these are two programs of"
                " one launch, the first has ended before it joined on one of them, and the results"
                " are of neither"
            )
    return None


def _are_alike(ours: str, our_numbers: set[str], theirs: str, their_numbers: set[str]) -> bool:
    pairs = zip_longest(_ARGUMENT.findall(ours), _ARGUMENT.findall(theirs))
    return all(one == two or (one in our_numbers and two in their_numbers) for one, two in pairs)


def _key(world: World, number: int) -> str:
    return f"allstep/joins/{world.rank}/{number}"


def _wait_until_gone(world: World, left: Callable[[], bytes]) -> None:
    """The process that was this rank before may be about to leave."""
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
    """The pid of a process that has left this note and still runs, unless it is our own."""
    if not left:
        return None
    where, pid, born = json.loads(left)
    is_other = where == namespace() and pid != os.getpid() and birth(pid) == born
    return int(pid) if is_other else None
