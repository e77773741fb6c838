"""Horovod's calls to start and stop a timeline.

`HOROVOD_TIMELINE=FILE` at `init()` starts a timeline at once; `HOROVOD_TIMELINE=DYNAMIC` only
allows `start_timeline`. Without the variable a later start is an error, as with Horovod. The file
belongs to rank 0, which creates it at once, so a path that cannot be written is an error of the
call. `horovod_trace` describes the contents; it receives events through the hooks of rank 0's
engine.
"""

import os

from allstep.engine import Engine, Hooks
from allstep.errors import ConfigError
from allstep.hvd.horovod_trace import HorovodTrace
from allstep.hvd.place import rank, running
from allstep.hvd.util import env_flag

VARIABLE = "HOROVOD_TIMELINE"


class _HorovodTimelineState:
    """The timeline of this process: the one being written, and whether one may be started."""

    def __init__(self) -> None:
        self.trace: HorovodTrace | None = None
        self.is_allowed = False


_process = _HorovodTimelineState()


def current() -> HorovodTrace | None:
    """Return the timeline that this process writes, or None."""
    return _process.trace


def hooks_for(engine: Engine) -> Hooks:
    """Return the hooks for a new engine, as HOROVOD_TIMELINE requests; called by `init`.

    Raise ValueError for a file that cannot be written.
    """
    value = os.environ.get(VARIABLE, "")
    _process.is_allowed = bool(value)
    if not value or value.upper() == "DYNAMIC" or engine.world.rank != 0:
        return Hooks()
    return _begin(engine, value, env_flag("HOROVOD_TIMELINE_MARK_CYCLES"))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write the phases of every tensor to the file `file_path` of rank 0 from now on.

    A running timeline ends first; the file may be the same. `mark_cycles`: also mark each answer of
    rank 0's coordinator (default: False). Horovod marks its cycles; here there are none.
    """
    engine = running()
    if not _process.is_allowed:
        raise ValueError(
            f"start_timeline({file_path!r}) needs {VARIABLE} to be set at init():"
            f" {VARIABLE}=DYNAMIC"
        )
    if rank() == 0:
        # First, since it may be the same file.
        stop_timeline()
        engine.hooks = _begin(engine, os.fspath(file_path), mark_cycles)


def _begin(engine: Engine, path: str, mark_cycles: bool) -> HorovodTrace:
    try:
        trace = HorovodTrace(path, engine.process_sets, mark_cycles)
    except ConfigError as error:
        raise ValueError(f"start_timeline: rank 0 cannot write it: {error}") from error
    _process.trace = trace
    return trace


def stop_timeline() -> None:
    """End the timeline; a no-op if there is none."""
    engine = running()
    if _process.trace is not None:
        engine.hooks = Hooks()
        ended, _process.trace = _process.trace, None
        ended.close()


def forget() -> None:
    """End the timeline and forget the permission to start one; called by `shutdown`."""
    stop_timeline()
    _process.is_allowed = False
