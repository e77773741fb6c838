"""The workers of one store on one host: the memory that they share, and which of them are lost.

They are counted from 0 on each host (`rank`, `size`); `names` has their ranks in the run.

A store needs the rendezvous of the ranks (`comm`) and no process group, so a worker that dies ends
no other worker's operations. Each worker has a line of shared memory, which only it writes:

    | barriers passed or entered | has closed the store |

A worker is lost if its process has ended or if it has closed its store.
"""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial

from torch._C._distributed_c10d import PrefixStore

from allstep.comm.group.init import session
from allstep.comm.group.joined import Joined
from allstep.comm.join.launcher_store import collect, reason_of_end
from allstep.comm.memory.kept import Sizes, new_memory
from allstep.errors import CollectiveMismatch, CommError, PeerLost, UserError
from allstep.kvstore.memory.bounded_wait import BoundedWait
from allstep.limits import MAX_SECONDS, read_limits
from allstep.process.futex import address_of, new_fence, wake
from allstep.process.liveness import Life, life_of

# Numbers of 8 bytes in a worker's line: 128 bytes, so that no two workers share a cache line.
LINE = 16
_BARRIERS, _CLOSED = 0, 1
# Seconds of waits in the store, whose limit is that of `_with_limits`.
_ANY = MAX_SECONDS


class Parties:
    """The workers of a store, seen from one of them. All of them create it together.

    name: what they share, for errors. members: the ranks of this host (default: all ranks; then
    UserError if these are on several hosts).
    """

    def __init__(self, name: str, members: Sequence[int] = ()) -> None:
        self._pid = os.getpid()
        self._joined: Joined | None = session().join()
        try:
            if not members:
                _check_one_host(name, self._joined)
            world = self._joined.world
            self.names = list(members) or list(range(world.size))
            self.rank, self.size = self.names.index(world.rank), len(self.names)
            self.limits = read_limits()
            fresh = self._joined.fresh_store("kvstore")
            self._store = PrefixStore(f"host of rank {self.names[0]}", fresh)
            self._used = 0
            self._lives = _lives(self._joined, self.names)
            memory = self.allocate(self.size * LINE * 8)
        except BaseException:
            self.close()
            raise
        self._numbers, self._address = memory.cast("q"), address_of(memory)
        self._fence = new_fence()

    def collect(self, what: str, text: str) -> list[str]:
        """Return the text that each worker passes, by rank. All workers call this together."""
        self._used += 1
        joined, store = self._here(), PrefixStore(f"{self._used} call", self._store)
        check = self._with_limits(what, joined.check_for(f"kvstore, {what}", store, "of"))
        own = json.dumps([what, text])
        try:
            found = collect(store, "of", self.rank, self.size, own, _ANY, check)
        except CommError:
            raise
        except RuntimeError as error:
            raise CommError(
                f"kvstore, {what}: the store of the ranks cannot be used any more: {error}",
                rank=self.names[self.rank],
            ) from error
        return self._of_one_call([json.loads(each) for each in found])

    def _of_one_call(self, found: Sequence[tuple[str, str]]) -> list[str]:
        """Return the texts of all workers; raise CollectiveMismatch if their calls differ."""
        calls = [call for call, _ in found]
        other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
        if other is not None:
            raise CollectiveMismatch(
                f"kvstore: rank {self.names[0]} calls {calls[0]} and rank {self.names[other]} calls"
                f" {calls[other]}; all workers make these calls in the same order",
                rank=self.names[self.rank],
            )
        return [text for _, text in found]

    def _with_limits(self, what: str, check: Callable[[], None]) -> Callable[[], None]:
        """Return `check` with a report of stalls and a time limit, for a wait in the store."""
        waiting = self.waiting(f"kvstore, {what}")

        def check_both() -> None:
            check()
            waiting.check_limits(f"a worker that has not called {what}")

        return check_both

    def allocate(self, nbytes: int) -> memoryview:
        """Return memory that all workers share, zero at first. All of them call this together."""
        self._used += 1
        self._here()
        sizes = Sizes(control=0, pool=0, common=max(1, nbytes))
        store = PrefixStore(f"{self._used} memory", self._store)
        check = self._with_limits("memory", partial(self._check_all, "memory"))
        return new_memory(store, self.rank, self.size, sizes, _ANY, check).common

    def _here(self) -> Joined:
        if self._joined is None:
            raise UserError("this kvstore is closed; create another one")
        return self._joined

    # Lost workers

    def is_lost(self, rank: int, closely: bool) -> bool:
        """Return whether a worker has ended or has closed its store.

        closely: also whether its process is ending; for waits that already take some milliseconds.
        """
        if self._numbers[rank * LINE + _CLOSED]:
            return True
        life = self._lives.get(rank)
        return life is not None and (life.is_ending() if closely else life.has_ended())

    def why_lost(self, rank: int) -> str:
        """Return why a worker is lost."""
        closed = self._numbers[rank * LINE + _CLOSED]
        return "has closed its store" if closed else "process exited"

    def check_generation(self) -> None:
        """Raise PeerLost if the generation of an elastic run has ended."""
        if (reason := reason_of_end(self._store)) is not None:
            raise PeerLost(reason, rank=self.names[self.rank])

    def _check_all(self, what: str) -> None:
        """Raise PeerLost if any worker is lost: the call needs all of them."""
        self.check_generation()
        for rank, life in self._lives.items():
            if life.is_ending():
                raise PeerLost(
                    f"kvstore, {what}: lost rank {self.names[rank]} (process exited); a call that"
                    " makes keys or optimizer state needs all workers",
                    rank=self.names[self.rank],
                    peer=self.names[rank],
                )

    # Waiting

    def waiting(self, text: str) -> BoundedWait:
        """Return a wait that begins now. `text`: what this worker does."""
        return BoundedWait(self, text)

    def barrier(self, needs_all: bool) -> set[int]:
        """Wait until all workers have called this; return those that are lost and did not.

        needs_all: raise PeerLost if one of them is lost.
        """
        numbers, own = self._numbers, self.rank * LINE + _BARRIERS
        self._fence()
        numbers[own] += 1
        wake(self._address + own * 8, self.size)
        waiting, lost = self.waiting("barrier"), set[int]()
        for other in range(self.size):
            at = other * LINE + _BARRIERS
            while (seen := numbers[at]) < numbers[own]:
                if waiting.nap(self._address + at * 8, seen, other) or numbers[at] >= numbers[own]:
                    continue
                if needs_all:
                    raise waiting.lost(other)
                lost.add(other)
                break
        self._fence()
        return lost

    def close(self) -> None:
        """Leave the store. The other workers keep their memory and continue."""
        joined, self._joined = self._joined, None
        # A forked child drops its copy of the store; its parent continues.
        if joined is not None and os.getpid() == self._pid:
            if hasattr(self, "_numbers"):
                self._numbers[self.rank * LINE + _CLOSED] = 1
            session().part()


def _check_one_host(name: str, joined: Joined) -> None:
    hosts = sorted({card["host"] for card in joined.cards})
    num_hosts = len(set(joined.nodes))
    if num_hosts > 1:
        raise UserError(
            f"{name}: the workers are on {num_hosts} hosts ({', '.join(hosts)}); expected one host;"
            " servers between hosts work for allstep.kvstore scripts only so far"
        )


def _lives(joined: Joined, names: Sequence[int]) -> dict[int, Life]:
    """Return the processes of the other workers; one in another pid namespace counts as alive."""
    return {
        names.index(rank): life_of(pid)
        for rank, pid in joined.neighbours.items()
        if pid != os.getpid() and rank in names
    }
