"""One wait for another worker of the store, which ends in any case.

The caller looks at a number in shared memory and naps until it changes:

    waiting = parties.waiting("pull of key 3")
    while numbers[at] < wanted:
        if not waiting.nap(address, numbers[at], peer):
            ...                                           # the worker `peer` is lost

A nap first yields the core, then sleeps in the kernel on that number (`process.futex`), for 2 ms at
first and 50 ms later. After each sleep the wait checks the awaited process, the end of an elastic
generation, and two of the limits: after ALLSTEP_STALL_SECONDS it reports once which worker it waits
for, after ALLSTEP_TIMEOUT it raises CollectiveTimeout.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from allstep.errors import CollectiveTimeout, PeerLost
from allstep.limits import Limits
from allstep.process.futex import sleep_until_changed

_YIELDS = 50
_SHORT_NAP, _LONG_NAP = 0.002, 0.05
# From this nap on, the flags of the awaited process's tasks are read, which costs 10 us.
_CLOSELY = 0.01


class Others(Protocol):
    """What a wait must know of the other workers; implemented by `Parties`."""

    rank: int
    limits: Limits

    @property
    def names(self) -> Sequence[int]:
        """The ranks of the run, by the numbers that are used here."""

    def is_lost(self, rank: int, closely: bool) -> bool:
        """Return whether a worker has ended or has left the store."""

    def why_lost(self, rank: int) -> str:
        """Return why: its process has exited, or it has closed its store."""

    def check_generation(self) -> None:
        """Raise PeerLost if the generation of an elastic run has ended."""


class BoundedWait:
    """A wait that begins now. `text`: what this worker does, for reports and errors."""

    def __init__(self, others: Others, text: str) -> None:
        self._others, self._text = others, text
        self._began = time.monotonic()
        self._yields = 0
        self._nap = _SHORT_NAP
        self._has_reported = False

    @property
    def seconds(self) -> float:
        """How long this worker has waited."""
        return time.monotonic() - self._began

    def name(self, peer: int) -> int:
        """Return the rank in the run of the worker that is counted as `peer` here."""
        return self._others.names[peer]

    def nap(self, address: int, seen: int, peer: int) -> bool:
        """Sleep until the number at `address` is not `seen`, or for a moment.

        Return False if the worker `peer`, which would change it, is lost.
        """
        if self._yields < _YIELDS:
            self._yields += 1
            os.sched_yield()
            return True
        sleep_until_changed(address, seen, self._nap)
        is_close = self._nap >= _CLOSELY
        self._nap = min(_LONG_NAP, self._nap * 1.5)
        if self._others.is_lost(peer, closely=is_close):
            return False
        self.check_limits(f"rank {self.name(peer)}", peer)
        return True

    def check_limits(self, awaited: str, peer: int | None = None) -> None:
        """Report a stall once, and raise CollectiveTimeout after ALLSTEP_TIMEOUT.

        awaited: who this worker waits for. peer: its number here, if known.
        """
        self._others.check_generation()
        limits, seconds, names = self._others.limits, self.seconds, self._others.names
        rank = names[self._others.rank]
        if seconds > limits.timeout:
            raise CollectiveTimeout(
                f"{self._text}: rank {rank} waited {seconds:.1f} s for {awaited}"
                " (ALLSTEP_TIMEOUT sets the limit)",
                rank=rank,
                op=self._text,
                peer=None if peer is None else names[peer],
                seconds=seconds,
            )
        if seconds > limits.stall and not self._has_reported:
            self._has_reported = True
            line = f"allstep: {self._text}: rank {rank} has waited {seconds:.0f} s for {awaited}"
            print(line, file=sys.stderr, flush=True)

    def lost(self, peer: int) -> PeerLost:
        """Return the error to raise if this worker cannot continue without `peer`."""
        names, seconds = self._others.names, self.seconds
        rank = names[self._others.rank]
        return PeerLost(
            f"{self._text}: lost rank {names[peer]} ({self._others.why_lost(peer)}); rank {rank}"
            f" waited {seconds:.1f} s",
            rank=rank,
            op=self._text,
            peer=names[peer],
            seconds=seconds,
        )
