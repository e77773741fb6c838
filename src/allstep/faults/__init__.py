"""Fault injection: kills, stops, slow ranks, damaged data and more, at a chosen point of a run.

```
kinds, spec            the table of kinds; the text `KIND[:VALUE]@WHERE` and its value
random_sequence        times, kinds and victims of `random:`, from the seed
schedule               which faults are due at which point; pure
injector               the points that other packages call, and what happens there (pace: `slow`)
acts                   what a victim does to its process
reports                the line, the record in the launcher's store, listeners
missing                names what did not occur (launcher_records: for the launcher)
elastic                which faults a worker of an elastic run has
```

`active` is None unless this process has faults, so that a point costs one comparison:

    if faults.active is not None:
        faults.active.at_step(number)

The faults of a run are in the environment variable ALLSTEP_FAULTS, which `--fault` extends. It is
read once, when the process joins its world (`begin`). Tests use `inject`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from allstep import errors, wire
from allstep import world as worlds
from allstep.faults.acts import AGENT, InjectedFault
from allstep.faults.elastic import FAULT_RANK, WorkerFaults
from allstep.faults.injector import Injector
from allstep.faults.reports import Occurred
from allstep.faults.spec import VARIABLE, check, join, parse_all

__all__ = [
    "AGENT",
    "VARIABLE",
    "InjectedFault",
    "Injector",
    "Occurred",
    "WorkerFaults",
    "active",
    "add",
    "begin",
    "begin_helper",
    "check",
    "handle",
    "inject",
    "join",
    "parse_all",
]

active: Injector | None = None
"""The faults of this process; None if it has none."""

_has_begun = False
_handlers: dict[str, Callable[[], None]] = {}
# Faults of this process's own command line, which its launcher does not know.
_added: list[str] = []


def add(texts: Sequence[str]) -> None:
    """Add faults to ALLSTEP_FAULTS of this process and of those that it starts.

    Raises ConfigError if one is wrong.
    """
    for text in texts:
        _added.extend(map(str, parse_all(text)))
    if texts:
        os.environ[VARIABLE] = join([os.environ.get(VARIABLE, ""), *texts])


def handle(kind: str, act: Callable[[], None]) -> None:
    """Let `act` carry out faults of this kind from now on."""
    _handlers[kind] = act


def begin(rank: int, size: int, own: WorkerFaults | None = None) -> None:
    """Read ALLSTEP_FAULTS for this process, rank `rank` of `size`, unless that has been done.

    own: which of them a worker of an elastic run has. There a world may be smaller than the ones
    to come, so a rank that it does not have is no error.
    Raises ConfigError if a fault is wrong: on rank 0; the others exit with the same status.
    """
    global active, _has_begun
    if _has_begun or active is not None:
        return
    _has_begun = True
    if not os.environ.get(VARIABLE, "").strip():
        return
    try:
        active = _read(rank, size, own)
    except errors.ConfigError as error:
        raise error if rank == 0 else SystemExit(error.exit_code) from None
    if active is not None:
        active.start_clock()
        active.reports.announce(_added)
        active.name_missing_at_exit()


def _read(rank: int, size: int, own: WorkerFaults | None) -> Injector | None:
    """Return the faults of this process; None if all of them belong to workers before it."""
    # Worker processes of loaders read both.
    os.environ.pop(FAULT_RANK, None)
    if own is not None:
        os.environ[VARIABLE] = own.left(os.environ[VARIABLE])
        os.environ[FAULT_RANK] = str(own.rank)
    text = os.environ[VARIABLE]
    if wire.keys.TICKET not in os.environ:
        check(text, size)
    return Injector.of(text, rank, size, _handlers, own) if text else None


def begin_helper(kind: str) -> None:
    """Read the faults of one kind, in a helper process of a rank."""
    global active
    if os.environ.get(VARIABLE, "").strip():
        world = worlds.World.detect()
        rank = int(os.environ.get(FAULT_RANK, world.rank))
        active = Injector.of(os.environ[VARIABLE], rank, world.size, _handlers)
        active.keep_only(kind)


@contextmanager
def inject(*texts: str, world: worlds.World | None = None) -> Iterator[Injector]:
    """Inject faults into this process within the block, for tests.

    texts: as after `--fault`. world: the position of this process (default: from the environment).
    The faults that the process had before are back after the block.
    """
    global active
    before, text = active, os.environ.get(VARIABLE)
    world = worlds.World.detect() if world is None else world
    check(join(texts), world.size)
    injector = Injector.of(join(texts), world.rank, world.size, _handlers)
    # Worker processes of loaders read it.
    os.environ[VARIABLE] = join(texts)
    active = injector
    injector.start_clock()
    try:
        yield injector
    finally:
        injector.end()
        active = before
        if text is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = text
