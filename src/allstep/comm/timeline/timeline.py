"""The timeline: one trace of every collective on every rank.

It is started by `ALLSTEP_TIMELINE=FILE`, or by `start_timeline` and `stop_timeline`.

```
rank 1   collectives -> recorder -> thread -> store, timeline/<n>/1/<chunk> --.
rank 2   collectives -> recorder -> thread -> store, timeline/<n>/2/<chunk> --+-> rank 0's thread
rank 0   collectives -> recorder -> thread -----------------------------------'   -> the file
```

A collective only records times (`recorder`). Twice a second a thread of each rank formats them as
lines (`chrome_trace`), on rank 0's clock (`clocks`), and brings them to the file (`collect`). This
module starts and ends it.

Rank 0's request counts for all ranks, so a variable that does not reach every host does no harm. A
file that cannot be written is an error on all ranks, at the start. Later errors never stop the run.
"""

import atexit
import json
import os
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from allstep.comm.join.barrier import host_name
from allstep.comm.join.clocks import offset_to_first
from allstep.comm.timeline import recorder
from allstep.comm.timeline.chrome_trace import Chrome, TraceFile
from allstep.comm.timeline.collect import Part, Sender, Writer
from allstep.errors import ConfigError, WorldError
from allstep.limits import read_limits

VARIABLE = "ALLSTEP_TIMELINE"


class _TimelineState:
    """The timeline of this process, if one is being written."""

    def __init__(self) -> None:
        self.running: Part | None = None
        # Keys of an earlier timeline must not be taken for those of a later one.
        self.number = 0

    def forget(self) -> None:
        """Drop the timeline in a forked child."""
        self.running = recorder.active = None


_process = _TimelineState()


def start_timeline(path: str | os.PathLike[str]) -> None:
    """Write every collective from now on to `path`, a file on rank 0's host.

    All ranks call it together; rank 0's `path` counts. Raises ConfigError on all ranks if the file
    cannot be written, or if a timeline is being written already.
    """
    if not dist.is_initialized():
        raise WorldError("start_timeline needs a process group: call allstep.init() first")
    if _process.running is not None:
        raise ConfigError(
            f"start_timeline({os.fspath(path)!r}): a timeline is already being written; call"
            " stop_timeline() first"
        )
    group = dist.distributed_c10d._get_default_group()
    begin(os.fspath(path), group.get_group_store(), dist.get_rank(), dist.get_world_size())


def stop_timeline() -> None:
    """End the timeline; on rank 0 the file is complete afterwards.

    All ranks call it together. A no-op without a timeline.
    """
    if _process.running is not None:
        ended, _process.running = _process.running, None
        atexit.unregister(stop_timeline)
        recorder.active = None
        ended.end()


def is_running() -> bool:
    """Return whether a timeline is being written."""
    return _process.running is not None


def begin_if_asked(store: Store, rank: int, size: int) -> None:
    """Start a timeline if rank 0's ALLSTEP_TIMELINE names a file.

    Called by all ranks when the default group is created.
    """
    # That of an earlier default group.
    stop_timeline()
    store = _new_store(store)
    if rank == 0:
        store.set("asked", os.environ.get(VARIABLE, ""))
    path = _read(store, "asked", read_limits().start)
    if path:
        begin(path, store, rank, size)


def count_again() -> None:
    """Number timelines from 0, as ranks that have just joined do; for a new generation."""
    _process.number = 0


def begin(path: str, store: Store, rank: int, size: int) -> None:
    """Start a timeline; all ranks of `store` call it together.

    Raises the same error on all of them if rank 0 cannot write the file.
    """
    seconds, store = read_limits().start, _new_store(store)
    file = _open(path, store) if rank == 0 else None
    try:
        problem, origin = json.loads(_read(store, "start", seconds))
        if problem:
            raise ConfigError(problem)
        offset = offset_to_first(store, rank, size, seconds, recorder.clock)
    except dist.DistError as error:
        raise WorldError(
            f"timeline {path}: not all {size} ranks started it within {seconds:.0f} s: {error}"
        ) from error
    chrome = Chrome(rank, offset.add - origin)
    part = Sender(chrome, store, rank) if file is None else Writer(chrome, store, size, file)
    _process.running = part
    part.start(chrome.introduction(host_name(), offset.error))
    atexit.register(stop_timeline)
    _forget_in_children()


def _new_store(store: Store) -> Store:
    """Return a part of the store for the keys of one timeline."""
    _process.number += 1
    return PrefixStore(f"timeline/{_process.number}", store)


def _open(path: str, store: Store) -> TraceFile | None:
    """Open the file and publish the result and the start time; None if it failed."""
    file, problem = None, ""
    try:
        file = TraceFile(path)
    except ConfigError as error:
        problem = str(error)
    store.set("start", json.dumps([problem, recorder.clock()]))
    return file


def _read(store: Store, key: str, seconds: float) -> str:
    store.wait([key], timedelta(seconds=seconds))
    return store.get(key).decode()


@cache
def _forget_in_children() -> None:
    """Make forked children (data loader workers), which are no ranks, drop the timeline."""
    os.register_at_fork(after_in_child=_process.forget)
