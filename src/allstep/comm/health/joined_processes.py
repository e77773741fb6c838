"""The processes of this host's ranks, known since the ranks joined.

A group learns the processes of its ranks from cards that they exchange in its store. A rank that
dies before it writes its card would be missed until the start timeout. So a group looks here first:
the ranks of one store have joined before they make groups in it, and then exchanged their pids.

The `Life` of each process was opened at that time, so a process that took the pid of a dead rank is
not mistaken for it.
"""

import weakref
from collections.abc import Mapping, Sequence

from torch._C._distributed_c10d import Store

from allstep.comm.health.processes import Lives
from allstep.comm.join.launcher_store import root_of
from allstep.errors import CommError

_by_store: weakref.WeakKeyDictionary[Store, Lives] = weakref.WeakKeyDictionary()


def remember(store: Store, pids: Mapping[int, int]) -> None:
    """Watch the processes of the ranks that joined through a store: `pids` by rank in the world."""
    try:
        _by_store[root_of(store)] = Lives(pids)
    except CommError:
        # One has ended already: a group that needs it raises this again, or finds it missing.
        forget(store)


def forget(store: Store) -> None:
    """Stop watching: this process leaves the ranks of the store."""
    _by_store.pop(root_of(store), None)


def lives_in(store: Store, ranks: Sequence[int]) -> Lives:
    """Return the processes of these ranks of the world, numbered by their place in `ranks`.

    Only processes of this host are known; none before the ranks have joined.
    """
    known = _by_store.get(root_of(store))
    return Lives() if known is None else known.among(ranks)
