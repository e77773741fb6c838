"""Injected faults in the run record: rank 0 writes one event for each, also for those of others."""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

from allstep import faults
from allstep.train.watch.callback import Callback, Callbacks
from allstep.train.watch.terminal import Display


@contextmanager
def recorded(callbacks: Sequence[Callback], known: Container[str] = ()) -> Iterator[None]:
    """Send the callbacks an event for each fault, except the display: the victim prints a line.

    A fault of this process is recorded before it acts, one of another rank at the next step, or at
    the end of the block. `known` are texts of events that are in the record already.
    """
    injector = faults.active
    if injector is None or not callbacks:
        yield
        return
    others = Callbacks([each for each in callbacks if not isinstance(each, Display)])

    def record(occurred: faults.Occurred) -> None:
        if str(occurred) not in known:
            others.event(str(occurred), fault=occurred.fault, rank=occurred.rank)

    injector.reports.listen(record)
    try:
        yield
    finally:
        injector.reports.poll(now=True)
