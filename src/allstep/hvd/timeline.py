"""Horovod's calls to start and stop a timeline.

`HOROVOD_TIMELINE=FILE` at `init()` asks for a timeline from the start, `HOROVOD_TIMELINE=DYNAMIC`
only allows `start_timeline`. Without the variable a later start is an error, as it is with Horovod.
The file belongs to rank 0, which makes it at once: a path that cannot be written is an error here
and now. What is in it is in `horovod_trace`; it hears of it through the hooks of rank 0's engine.
"""

import os

from allstep.engine import Engine, Hooks
from allstep.errors import ConfigError
from allstep.hvd.horovod_trace import HorovodTrace
from allstep.hvd.place import rank, running
from allstep.hvd.util import env_flag

VARIABLE = "HOROVOD_TIMELINE"


class _HorovodTimelineState:
    """The timeline of this process: the one that is written, and whether one may be started."""

    def __init__(self) -> None:
        self.trace: HorovodTrace | None = None
        self.is_allowed = False


_process = _HorovodTimelineState()


def current() -> HorovodTrace | None:
    """The one that is being written by this process."""
    return _process.trace


def asked_for(engine: Engine) -> Hooks:
    """Called by `init` before anything happens: read the variable once.

    A file that cannot be written is a ValueError of init().
    """
    value = os.environ.get(VARIABLE, "")
    _process.is_allowed = bool(value)
    if not value or value.upper() == "DYNAMIC" or engine.world.rank != 0:
        return Hooks()
    return _begin(engine, value, env_flag("HOROVOD_TIMELINE_MARK_CYCLES"))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what happens to every tensor to this file of rank 0, from now on. Another file, or the
    same again, may follow.

    mark_cycles: also show when rank 0 tells the others what to do. Horovod marks its cycles; here
    there are none.
    """
    engine = running()
    if not _process.is_allowed:
        raise ValueError(
            f"start_timeline({file_path!r}) needs {VARIABLE} to be set at init():"
            f" {VARIABLE}=DYNAMIC"
        )
    if rank() == 0:
        stop_timeline()  # first, since it may be the same file
        engine.hooks = _begin(engine, os.fspath(file_path), mark_cycles)


def _begin(engine: Engine, path: str, mark_cycles: bool) -> HorovodTrace:
    try:
        trace = HorovodTrace(path, engine.process_sets, mark_cycles)
    except ConfigError as error:
        raise ValueError(f"start_timeline: rank 0 cannot write it: {error}") from error
    _process.trace = trace
    return trace


def stop_timeline() -> None:
    """End it; nothing happens when there is none."""
    engine = running()
    if _process.trace is not None:
        engine.hooks = Hooks()
        ended, _process.trace = _process.trace, None
        ended.close()


def forget() -> None:
    """Called by `shutdown`."""
    stop_timeline()
    _process.is_allowed = False
