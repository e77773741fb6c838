"""Notices: how a rank that has joined hears of steps that others begin outside the engine.

The optimizer reduces gradients in a group of its own, where all ranks must come. It gives notice of
each step before it begins (`begin`); a rank that has joined takes part when it hears of a step that
it has not begun itself (`heard`).

As long as nobody has joined, a notice goes nowhere: it is only noted how far we are. When somebody
joins, all ranks are told, post how far they are, and post every notice from then on. Whoever joins
posts how far he is before he says so. So no step is missed, whichever came first.
"""

import threading
from collections import deque
from collections.abc import Callable

from allstep.engine.messages import NOTICE, pack
from allstep.errors import CommError


class Notices:
    """post: to the coordinator. wake: the thread that runs the callbacks."""

    def __init__(self, post: Callable[[bytes], None], wake: Callable[[], None]) -> None:
        self.callbacks: dict[str, Callable[[int], None]] = {}
        self._post, self._wake = post, wake
        self._lock = threading.Lock()
        self._steps: dict[str, int] = {}
        self._somebody_joined = False
        self._errands: deque[tuple[str, int]] = deque()

    def begin(self, key: str, number: int) -> None:
        """This rank begins a step."""
        with self._lock:
            self._steps[key] = number
            if self._somebody_joined:
                self._post(_notice(key, number))

    def post_all(self) -> None:
        """How far we are, in everything."""
        for key, number in self._steps.items():
            self._post(_notice(key, number))

    def somebody_joined(self, yes: bool) -> None:
        with self._lock:
            self._somebody_joined = yes
            if yes:
                self.post_all()

    def heard(self, key: str, number: int) -> None:
        """We have joined, and others have begun a step, perhaps without us."""
        if number > self._steps.get(key, 0):
            self._steps[key] = number
            self._errands.append((key, number))
            self._wake()

    def run_errands(self) -> None:
        """Take part in the steps that we have heard of, in their order."""
        while self._errands:
            key, number = self._errands.popleft()
            if key not in self.callbacks:
                raise CommError(
                    f"{key}: others begin step {number}, and this rank has joined without"
                    " knowing it"
                )
            self.callbacks[key](number)


def _notice(key: str, number: int) -> bytes:
    return pack([NOTICE, key.encode(), b"%d" % number])
