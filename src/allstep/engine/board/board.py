"""How requests reach the coordinator, and how its answers reach all ranks.

Two implementations: `shared_board` on one host, `socket_board` between hosts.

A rank posts its requests. Rank 0 reads the posts and publishes answers, which every rank reads in
the same order. Rank 0's own messages need no transport: they wait in a list.

Any thread may call `post` and `wake`. The other methods belong to the thread that drives the
engine, one at a time, except `sleep`: there the engine's own thread waits until there is work and
no caller drives.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence


class Board(ABC):
    """One rank's side of the board.

    Frames are messages with their length, as `wire.pack` makes them; messages are without it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._own_posts: deque[bytes] = deque()
        self._own_published: deque[bytes] = deque()

    def _take_own_posts(self) -> list[tuple[int, bytes]]:
        found = []
        while self._own_posts:
            found.append((self.rank, self._own_posts.popleft()))
        return found

    def _take_own_published(self) -> list[bytes]:
        found = list(self._own_published)
        self._own_published.clear()
        return found

    @abstractmethod
    def post(self, frame: bytes, driving: bool = False) -> None:
        """Send a message to the coordinator. Never wait.

        `driving`: the caller drives next, so no thread of this rank is woken.
        """

    @abstractmethod
    def posts(self) -> list[tuple[int, bytes]]:
        """On rank 0: return the new posts, as (rank, message)."""

    @abstractmethod
    def publish(self, frames: Sequence[bytes]) -> None:
        """On rank 0: send messages to all ranks."""

    @abstractmethod
    def published(self) -> list[bytes]:
        """Return the new messages of rank 0."""

    @abstractmethod
    def look(self) -> None:
        """Receive what is available and send what was left over.

        Call it before `posts` and `published`.

        A message that arrives later ends the next `wait`.
        """

    @abstractmethod
    def has_work(self) -> bool:
        """Return whether there are messages to process or to send."""

    @abstractmethod
    def attend(self) -> None:
        """Note that a caller drives from now on: the engine's thread stays asleep."""

    @abstractmethod
    def leave(self) -> None:
        """Note that the caller stops driving; wake the engine's thread if there is work left."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait, in the caller that drives, for a message after `look`, at most `seconds`."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Sleep, in the thread, until there is work and no caller drives; at most `seconds`."""

    @abstractmethod
    def wake(self) -> None:
        """Wake the engine's thread, even if a caller drives."""

    @abstractmethod
    def nudge(self) -> None:
        """Wake the thread that drives, so that it processes our posts."""

    @abstractmethod
    def lost(self, closely: bool = False) -> int | None:
        """Return a rank that has ended or has closed its board, or None.

        Rank 0 checks all ranks; the other ranks check rank 0. `closely`: a caller waits, so check
        also for processes that are still ending (see `allstep.process.liveness`).
        """

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the board."""
