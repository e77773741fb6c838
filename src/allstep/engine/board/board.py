"""How requests reach the coordinator, and its answers all ranks. Two ways: `shared_board` on one
host, `socket_board` between hosts.

A rank posts what it asks for; rank 0 reads the posts and tells all ranks the answers, which every
rank reads in the same order. Rank 0's own messages need no transport: they wait in a list.

Who uses which side: `post` and `wake` are for any thread. The rest belongs to whoever drives the
engine, one thread at a time, except `sleep`: that is where the engine's own thread waits until
there is something to do and nobody who does it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence


class Board(ABC):
    """One rank's side of it.

    Frames are messages with their length, as `wire.pack` makes them; messages come without.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._own_posts: deque[bytes] = deque()
        self._own_told: deque[bytes] = deque()

    def _take_own_posts(self) -> list[tuple[int, bytes]]:
        found = []
        while self._own_posts:
            found.append((self.rank, self._own_posts.popleft()))
        return found

    def _take_own_told(self) -> list[bytes]:
        found = list(self._own_told)
        self._own_told.clear()
        return found

    @abstractmethod
    def post(self, frame: bytes, driving: bool = False) -> None:
        """Say something to the coordinator.

        Never waits. driving: the caller drives next, so nobody here must be woken.
        """

    @abstractmethod
    def posts(self) -> list[tuple[int, bytes]]:
        """Rank 0: what ranks have posted since."""

    @abstractmethod
    def tell(self, frames: Sequence[bytes]) -> None:
        """Rank 0: say something to all ranks."""

    @abstractmethod
    def told(self) -> list[bytes]:
        """What rank 0 has told since."""

    @abstractmethod
    def look(self) -> None:
        """Before `posts` and `told`: whatever comes from now on ends the next wait.

        Sends what had to stay behind.
        """

    @abstractmethod
    def has_news(self) -> bool:
        """Whether there is anything to do."""

    @abstractmethod
    def attend(self) -> None:
        """A caller drives from now on: leave the thread asleep."""

    @abstractmethod
    def leave(self) -> None:
        """The caller drives no more; what is left is the thread's."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """The caller who drives: until something has come since `look`, at most so long."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """The thread: until there is something to do and no caller to do it, at most so long."""

    @abstractmethod
    def wake(self) -> None:
        """Wake the thread, whoever drives."""

    @abstractmethod
    def nudge(self) -> None:
        """Whoever drives shall look at what we posted."""

    @abstractmethod
    def lost(self, closely: bool = False) -> int | None:
        """A rank that is gone, or has closed its board: of all for rank 0; the others look after
        rank 0.

        closely: a caller waits, so look also for processes that are still ending (see
        `allstep.process.liveness`)."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the board holds."""
