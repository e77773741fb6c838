"""Process sets: subsets of the ranks with collectives of their own.

    evens = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[evens])                # static: exists from the start
    odds = hvd.add_process_set([1, 3])            # dynamic: after init(process_sets="dynamic"),
                                                  # on every rank
    hvd.allreduce(loss, process_set=evens)        # on ranks 0 and 2

A set is usable once the engine has given it a number. `shutdown()` takes the numbers back, so that
an object kept over a restart cannot name another set by accident.
"""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from allstep.hvd.place import rank, running


def _ranks_of(given: Any) -> Iterable[Any]:
    if hasattr(given, "Get_group"):
        raise ValueError(
            "a ProcessSet of an mpi4py communicator needs MPI as transport; give the list of"
            " its ranks instead"
        )
    if not isinstance(given, Iterable):
        raise ValueError(f"ProcessSet({given!r}): expected a list of ranks")
    return given


def _number(each: Any, given: Any) -> int:
    try:
        return index(each)
    except TypeError:
        raise ValueError(f"ProcessSet({given!r}): a rank is a whole number, not {each!r}") from None


class ProcessSet:
    """A subset of the ranks. Two sets are equal only if they are the same object.

    `ranks_or_comm`: the ranks; empty means all ranks.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] = sorted(
            _number(each, ranks_or_comm) for each in _ranks_of(ranks_or_comm)
        )
        # Horovod's sets may hold an MPI communicator; ours are always lists of ranks.
        self.mpi_comm: Any = None

    def size(self) -> int | None:
        """Return the number of ranks in the set; None before it is registered."""
        return None if self.process_set_id is None else len(self._members())

    def rank(self) -> int | None:
        """Return the number of this process in the set; None before the set is registered."""
        if self.process_set_id is None:
            return None
        members, ours = self._members(), rank()
        if ours not in members:
            raise ValueError(
                f"rank {ours} is not part of process set {self.process_set_id} with ranks"
                f" {list(members)}"
            )
        return members.index(ours)

    def included(self) -> bool:
        """Return whether this process is a member."""
        return rank() in self.ranks

    def _members(self) -> Sequence[int]:
        assert self.process_set_id is not None
        known = running().process_sets
        if self.process_set_id not in known:
            raise ValueError(
                f"process set {self.process_set_id} does not exist, or has not been registered;"
                f" there are {sorted(known)}"
            )
        return known[self.process_set_id]

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks},"
            f" mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

# The sets that have a number now.
_registered: list[ProcessSet] = []


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a process set while the engine runs, and return it.

    All processes, members or not, call it in the same order; it returns once all have.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    added.process_set_id = running().add_process_set(added.ranks)
    _registered.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Return False if it is the world's or not registered.

    All processes call it in the same order.
    """
    number = process_set.process_set_id
    removed = running().remove_process_set(number) if number is not None else False
    if removed:
        process_set.process_set_id = None
        _registered.remove(process_set)
    return removed


def register(sets: Sequence[ProcessSet]) -> None:
    """Give each set the number that the running engine has for its ranks; called by `init`."""
    current = running()
    global_process_set.ranks = list(range(current.world.size))
    numbers = {ranks: number for number, ranks in current.process_sets.items()}
    taken = {0}
    for place, each in enumerate(sets):
        number = numbers.get(tuple(each.ranks or global_process_set.ranks))
        if number is None:
            raise ValueError(
                f"process set {place}, with ranks {each.ranks}, was not an argument of the init()"
                " that started the engine: use add_process_set"
            )
        if number in taken:
            raise ValueError(
                f"process set {place} of init(), with ranks {each.ranks}, is a duplicate of process"
                f" set {number}; every set needs other ranks than the sets before it and than the"
                " whole world"
            )
        taken.add(number)
        each.process_set_id = number
        _registered.append(each)


def forget() -> None:
    """Take back the numbers of all sets except the world's; called by `shutdown`."""
    for each in _registered:
        each.process_set_id = None
    _registered.clear()
