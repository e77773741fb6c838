"""The ranks over which a norm computes statistics: those of a group or process set, or all.

```
given                        the group
torch's ProcessGroup         itself
hvd.ProcessSet               a group of the engine, of the set's members, for norms alone; looked up
                             at each forward, because a set gets another number when hvd restarts
None, hvd runs               the same for set 0, the world
None, after allstep.init()   a group of all ranks, for norms alone
None, otherwise              torch's default group; before init_process_group none: one process
```
"""

from typing import Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup

from allstep import engine
from allstep.comm.group.init import group_for, is_running
from allstep.engine import Engine
from allstep.errors import ConfigError


class ProcessSet(Protocol):
    """The attributes of an `hvd.ProcessSet`, which a higher layer defines."""

    process_set_id: int | None
    ranks: list[int]


Among = ProcessGroup | ProcessSet | None


def ranks_of(chosen: Among) -> ProcessGroup | None:
    """Return the group for the statistics, or None for one process; see the module docstring.

    Members of a process set call it together.
    """
    if isinstance(chosen, ProcessGroup):
        return chosen
    running = engine.current()
    if chosen is not None:
        return _of_set(chosen, running)
    if running is not None:
        return running.group("norm", 0)
    return group_for("norm") if is_running() else dist.group.WORLD


def _of_set(chosen: ProcessSet, running: Engine | None) -> ProcessGroup:
    """Return the group of a registered process set that this rank is in; else ConfigError."""
    if not hasattr(chosen, "process_set_id"):
        raise ConfigError(
            f"process_group={chosen!r} of a norm: give a torch.distributed group that this rank is"
            " in, an hvd.ProcessSet, or None for all ranks"
        )
    number, ranks = chosen.process_set_id, list(chosen.ranks)
    if running is None or number is None or running.process_sets.get(number) != tuple(ranks):
        raise ConfigError(
            f"the process set of a norm, with ranks {ranks}, is not registered: give it to"
            " hvd.init(process_sets=[...]) or to hvd.add_process_set before the first batch, and"
            " again after each hvd.shutdown()"
        )
    if running.world.rank not in ranks:
        raise ConfigError(
            f"rank {running.world.rank} has a norm over process set {number}, with ranks {ranks},"
            " and is not in it: give each rank a set that it is in, such as"
            f" hvd.ProcessSet([{running.world.rank}]), or None for all ranks"
        )
    return running.group("norm", number)
