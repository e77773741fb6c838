"""The processes of several ranks of this host, for waits that are not for one rank in particular.

`wait` knows which rank is missing and looks at that one. The engine's board and waits inside Gloo
do not know it: they look at all, with a bound on what a look costs, since the flags of a process
take about 10 us to read (see `allstep.process.liveness`).
"""

from collections import deque
from collections.abc import Mapping

from allstep.errors import CommError
from allstep.process.liveness import Life, life_of

_MAX_LOOKS = 8  # processes whose flags one look reads; the next look continues with the others


class Lives:
    """pids: of the ranks, by rank; our own must not be among them."""

    def __init__(self, pids: Mapping[int, int] = {}) -> None:
        self._lives: dict[int, Life] = {}
        for rank, pid in pids.items():
            try:
                self._lives[rank] = life_of(pid)
            except OSError as error:
                why = f"the process {pid} of rank {rank} cannot be watched: {error}"
                raise CommError(why, peer=rank) from error
        self._turn = deque(self._lives)

    def lost(self, closely: bool) -> int | None:
        """A rank whose process has ended. closely: or is ending, for waits of some milliseconds."""
        for rank, life in self._lives.items():
            if life.has_ended():
                return rank
        return self._ending() if closely else None

    def _ending(self) -> int | None:
        for _ in range(min(_MAX_LOOKS, len(self._turn))):
            rank = self._turn[0]
            if self._lives[rank].is_ending():
                return rank
            self._turn.rotate(-1)
        return None

    def forget(self, rank: int) -> None:
        """The process of this rank may end: it has left."""
        del self._lives[rank]
        self._turn.remove(rank)

    def close(self) -> None:
        """Watch no process any more."""
        self._lives, self._turn = {}, deque()
