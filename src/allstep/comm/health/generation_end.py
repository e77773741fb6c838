"""The end of a generation frees every wait of this process at once (D14).

The launcher writes one notice when a generation is over, with the reason. A thread of every member
waits for it. It then fails all groups of the process: a blocked caller raises PeerLost at once, a
computing one at its next collective. Waits at the store name the same key and end by themselves
(`WireStore.unless`).

A rank that detects a loss by itself does not wait for the notice: `Guard.fail` also fails the other
groups of the process.

The same thread waits for the request to leave the generation in order, when workers join or hosts
are removed (`on_change`). The members leave after their step, or at their next commit.
"""

import contextlib
import threading
from collections.abc import Callable
from itertools import count

from allstep import wire
from allstep.comm.health.failure import Failure
from allstep.comm.health.threads import watch
from allstep.wire.keys import change_of, end_of

_DAY = 86_400.0
_listeners: set[Callable[[str], None]] = set()


def on_change(listener: Callable[[str], None]) -> None:
    """Call `listener` with "grow", "shrink" or "mixed" when the launcher asks for another world.

    It is called in a thread of its own, once for each request.
    """
    _listeners.add(listener)


class EndWatch:
    """Waits for the end of a generation, in a thread, until `close`.

    client: used by this object alone. rank: ours.
    """

    def __init__(self, client: wire.Client, generation: int, rank: int) -> None:
        self._client, self._generation, self._rank = client, generation, rank
        self._thread = threading.Thread(target=self._wait, name="allstep-end", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop waiting."""
        self._client.close_all()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _wait(self) -> None:
        # The launcher is lost, or this process leaves the generation.
        with contextlib.suppress(ConnectionError, TimeoutError):
            try:
                self._wait_for_changes()
            except wire.WaitEnded as end:
                watch().fail_all(ended(end.value.decode(), self._rank))

    def _wait_for_changes(self) -> None:
        """Call the listeners for each change, until the generation ends."""
        for number in count():
            key = change_of(self._generation, number)
            (kind,) = self._client.get_all([key], _DAY, unless=end_of(self._generation))
            for listener in tuple(_listeners):
                listener(kind.decode())


def ended(reason: str, rank: int) -> Failure:
    """Return the failure of all groups of a generation that the launcher has ended."""
    return Failure("PeerLost", reason, None, rank)
