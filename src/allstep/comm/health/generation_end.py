"""The end of a generation frees every wait of this process at once (D14).

The launcher writes one notice when a generation is over, with the reason. A thread of every member
waits for it. It then fails all groups of the process: a blocked caller raises PeerLost at once, a
computing one at its next collective. Waits at the store name the same key and end by themselves
(`WireStore.unless`).

A rank that detects a loss by itself does not wait for the notice: `Guard.fail` also fails the other
groups of the process.

The same thread waits for the request to leave the generation in order, when workers join or hosts
are removed. The members leave after their step, or at their next commit. A request may arrive
before the members have their state: it stays in `EndWatch.changes` until they leave. Code that does
not look there at each step registers a function (`on_change`).

The launcher closes the connections of a worker that it has left out. Such a worker was cut off from
the launcher for too long, and its agent could not kill it. It exits as soon as the store refuses
its ticket, whatever its other threads do: the next world may use its files already.
"""

import os
import threading
from collections.abc import Callable
from typing import NoReturn

from allstep import wire
from allstep.comm.health.failure import Failure
from allstep.comm.health.threads import watch
from allstep.comm.join.launcher_store import WireStore
from allstep.console.escape import print_notice
from allstep.wire.keys import change_of, end_of

# One request to the store. Between two of them a worker notices that its connection is dead, which
# the kernel does not report while it only waits.
_ROUND_SECONDS = 60.0
# After the end of the connection: until the next attempt.
_AGAIN_SECONDS = 1.0
_listeners: set[Callable[[str], None]] = set()


def on_change(listener: Callable[[str], None]) -> None:
    """Call `listener` with "grow", "shrink" or "mixed" when the launcher asks for another world.

    It is called in a thread of its own, once for each request.
    """
    _listeners.add(listener)


class EndWatch:
    """Waits for the end of a generation, in a thread, until `close`.

    client: used by this object alone. rank: ours. store: that of the groups of the generation.
    changes: requests to leave the generation, each "grow", "shrink" or "mixed".
    """

    def __init__(self, client: wire.Client, generation: int, rank: int, store: WireStore) -> None:
        self._client, self._generation, self._rank = client, generation, rank
        self._store = store
        self.changes: tuple[str, ...] = ()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="allstep-end", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the launcher has ended the generation."""
        return bool(self._store.ended)

    def close(self) -> None:
        """Stop waiting."""
        self._closing.set()
        self._client.close_all()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _wait(self) -> None:
        while not self._closing.is_set():
            try:
                self._wait_for_change()
            except wire.WaitEnded as end:
                reason = end.value.decode()
                # First, for groups that are made from now on (`backend.create`).
                self._store.ended = reason
                watch().fail_all(ended(reason, self._rank))
                return
            except wire.TicketRefused as refused:
                _exit_at_once(refused)
            except wire.KeysLate:
                continue
            # The launcher is lost, or out of reach, or this process leaves the generation.
            except ConnectionError:
                self._closing.wait(_AGAIN_SECONDS)

    def _wait_for_change(self) -> None:
        """Call the listeners for the next change; WaitEnded when the generation ends."""
        key, end = change_of(self._generation, len(self.changes)), end_of(self._generation)
        (kind,) = self._client.get_all([key], _ROUND_SECONDS, unless=end)
        self.changes += (kind.decode(),)
        for listener in tuple(_listeners):
            listener(kind.decode())


def _exit_at_once(refused: wire.TicketRefused) -> NoReturn:
    """End this process, which the launcher has left out: no handler of the script may run."""
    try:
        print_notice(f"this worker was cut off from the run and exits: {refused}")
    # Standard error may be a pipe to an agent that has ended.
    finally:
        os._exit(1)


def ended(reason: str, rank: int) -> Failure:
    """Return the failure of all groups of a generation that the launcher has ended."""
    return Failure("PeerLost", reason, None, rank)
