"""The processes of several ranks of this host, for waits on no particular rank.

A wait in shared memory knows which rank is missing and checks that one (`comm.memory.flags`). The
engine's board and waits inside Gloo do not know it and check all processes. The cost of one check
is bounded, because reading the flags of a process takes about 10 us (see
`allstep.process.liveness`).
"""

from collections import deque
from collections.abc import Mapping, Sequence

from allstep.errors import CommError
from allstep.process.liveness import Life, life_of

# Processes whose flags one check reads; the next check continues with the others.
_MAX_LOOKS = 8


class Lives:
    """The processes of other ranks. `pids`: by rank, without our own."""

    def __init__(self, pids: Mapping[int, int] = {}) -> None:
        self._lives: dict[int, Life] = {}
        for rank, pid in pids.items():
            try:
                self._lives[rank] = life_of(pid)
            except OSError as error:
                why = f"the process {pid} of rank {rank} cannot be watched: {error}"
                raise CommError(why, peer=rank) from error
        self._turn = deque(self._lives)

    def among(self, ranks: Sequence[int]) -> "Lives":
        """Return the processes of some ranks, each numbered by its place in `ranks`."""
        found = Lives()
        found._lives = {
            place: self._lives[rank] for place, rank in enumerate(ranks) if rank in self._lives
        }
        found._turn = deque(found._lives)
        return found

    def lost(self, closely: bool) -> int | None:
        """Return a rank whose process has ended, if any.

        `closely`: also if it is ending; for waits that already take some milliseconds.
        """
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
        """Stop watching the process of a rank that has left."""
        del self._lives[rank]
        self._turn.remove(rank)

    def close(self) -> None:
        """Stop watching all processes."""
        self._lives, self._turn = {}, deque()
