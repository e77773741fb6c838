"""Notices: inform ranks that have joined of steps that other ranks begin outside the engine.

The optimizer reduces gradients in a group of its own, in which all ranks must participate. It gives
notice of each step before it begins (`begin`). A rank that has joined participates when it receives
the notice of a step that it has not begun itself (`receive`).

While no rank has joined, a notice is not sent: only the number of the step is recorded. When a rank
joins, the coordinator informs all ranks; each posts its current steps and from then on every
notice. The joining rank posts its own steps before its request to join. So no step is missed,
whichever message arrives first.
"""

import threading
from collections import deque
from collections.abc import Callable

from allstep.engine.messages import NOTICE, pack
from allstep.errors import CommError


class Notices:
    """The steps of this rank, and the callbacks for steps of other ranks.

    `post`: sends a message to the coordinator. `wake`: wakes the thread that runs the callbacks.
    """

    def __init__(self, post: Callable[[bytes], None], wake: Callable[[], None]) -> None:
        self.callbacks: dict[str, Callable[[int], None]] = {}
        self._post, self._wake = post, wake
        self._lock = threading.Lock()
        self._steps: dict[str, int] = {}
        self._any_joined = False
        self._queued: deque[tuple[str, int]] = deque()

    def begin(self, key: str, number: int) -> None:
        """Record that this rank begins a step, and send a notice if some rank has joined."""
        with self._lock:
            self._steps[key] = number
            if self._any_joined:
                self._post(_notice(key, number))

    def post_all(self) -> None:
        """Post the current step of every key."""
        for key, number in self._steps.items():
            self._post(_notice(key, number))

    def set_any_joined(self, yes: bool) -> None:
        """Set whether some rank has joined; if so, post the current steps."""
        with self._lock:
            self._any_joined = yes
            if yes:
                self.post_all()

    def receive(self, key: str, number: int) -> None:
        """Queue the callback of a step that other ranks have begun; for a rank that has joined."""
        if number > self._steps.get(key, 0):
            self._steps[key] = number
            self._queued.append((key, number))
            self._wake()

    def run_callbacks(self) -> None:
        """Run the callbacks of the steps in the queue, in order."""
        while self._queued:
            key, number = self._queued.popleft()
            if key not in self.callbacks:
                raise CommError(
                    f"{key}: other ranks begin step {number}, but this rank has joined without"
                    " a callback for it: call on_notice before join"
                )
            self.callbacks[key](number)


def _notice(key: str, number: int) -> bytes:
    return pack([NOTICE, key.encode(), b"%d" % number])
