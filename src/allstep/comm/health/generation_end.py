"""The end of a generation frees every wait of this process at once (D14).

The launcher writes one notice when a generation is over, with the reason. A thread of every member
waits for it. It then fails all groups of the process: a blocked caller raises PeerLost at once, a
computing one at its next collective. Waits at the store name the same key and end by themselves
(`WireStore.unless`).

A rank that detects a loss by itself does not wait for the notice: `Guard.fail` also fails the other
groups of the process.
"""

import contextlib
import threading

from allstep import wire
from allstep.comm.health.failure import Failure
from allstep.comm.health.threads import watch
from allstep.wire.keys import end_of

_DAY = 86_400.0


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
            reason = self._client.get(end_of(self._generation), _DAY).decode()
            watch().fail_all(ended(reason, self._rank))


def ended(reason: str, rank: int) -> Failure:
    """Return the failure of all groups of a generation that the launcher has ended."""
    return Failure("PeerLost", reason, None, rank)
