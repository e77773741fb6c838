"""Shared memory that the survivors of a generation use again in the next one (D14).

A world that only loses members needs no new memory. At creation, a segment of an elastic run has
pages for the next generations; the ranks use the page of their generation and the pools that they
had from the beginning:

    segment   | page of generation b | page of b + 1 | ... | pool of slot 0 | pool of slot 1 | ...

A page contains what the ranks of a host compare and count: flags, texts. Each page belongs to one
generation only, and is zero before it. So counters start at zero, and what a rank of an earlier
generation wrote last is never mistaken for a value of this one. A rank writes only into its own
line of a page and into its own pool; a pool has no state of its own.

Every rank lists in its request for a place which segments it holds (`claims`). The launcher sends
the requests of all members to each of them. So all ranks of a host know, without asking each other,
whether all of them hold the same segment: then they use it, and it needs neither the store nor a
page fault. If one of them does not (it has joined, or a world ended while its memory was made), or
if the pages are used up, all ranks make a new segment together.

When a plan names the survivors, every other rank is dead (all its tasks are exiting) or has left
its groups, and every survivor has left its groups. An operation of an old group that is still in a
thread could write into the pool of its rank: such a rank does not claim the segment (`drop`).
"""

import mmap
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from allstep.comm.memory.segment import Segment, rounded, share

# The first generation of a segment, and 16 losses.
NUM_PAGES = 17

Claim = tuple[str, int, int]
"""The nonce of a segment, the generation in which it was made, and our slot in it."""


@dataclass(frozen=True)
class HostMemory:
    """Memory of the ranks of a host, for one generation.

    control: zero at first. pools: one for each rank, by rank. common: for all ranks.
    """

    control: memoryview
    pools: list[memoryview]
    common: memoryview


@dataclass(frozen=True)
class Sizes:
    """The bytes of each part of a segment: one page of control, one pool, the common part."""

    control: int
    pool: int
    common: int = 0

    def total(self, num_pages: int, num_slots: int) -> int:
        """Return the bytes of a segment."""
        pools = num_slots * rounded(self.pool)
        return num_pages * rounded(self.control) + pools + rounded(self.common)

    def cut(self, view: memoryview, page: int, num_pages: int, slots: Sequence[int]) -> HostMemory:
        """Return one page of a segment, and the pools in these slots."""
        pools_at = num_pages * rounded(self.control)
        step = rounded(self.pool)
        pools = [
            view[start : start + self.pool] for start in (pools_at + slot * step for slot in slots)
        ]
        start = page * rounded(self.control)
        control = view[start : start + self.control]
        return HostMemory(control, pools, view[len(view) - rounded(self.common) :])


@dataclass(frozen=True)
class KeptSegment:
    """A segment that this process has mapped since generation `born`, where it has slot `slot`."""

    segment: Segment
    sizes: Sizes
    born: int
    slot: int

    @property
    def claim(self) -> Claim:
        """What the other ranks must know to use it again."""
        return self.segment.nonce, self.born, self.slot


class KeptMemory:
    """The segments of a process, by the purpose of their group."""

    def __init__(self) -> None:
        self.segments: dict[str, KeptSegment] = {}

    def claims(self) -> dict[str, Claim]:
        """Return a claim to each segment; for the request for a place in the next world."""
        return {purpose: kept.claim for purpose, kept in self.segments.items()}

    def drop(self, purpose: str) -> None:
        """Do not use the segment of this purpose again; it is freed with the last view of it."""
        self.segments.pop(purpose, None)


_process = KeptMemory()


def kept_memory() -> KeptMemory:
    """Return the kept memory of this process."""
    return _process


class WorldMemory:
    """The shared memory of the groups of one generation.

    claims: those of the ranks of our host, by rank of the world, our own included. memory: what
    this process has kept.
    """

    def __init__(
        self, generation: int, claims: Mapping[int, Mapping[str, Claim]], memory: KeptMemory
    ) -> None:
        self._generation, self._memory = generation, memory
        self._ranks = tuple(claims)
        self._used: set[str] = set()
        self._held = dict(memory.segments)
        self._slots: dict[str, list[int]] = {}
        for purpose in self._held:
            slots = self._common_slots([mine.get(purpose) for mine in claims.values()])
            if slots is None:
                memory.drop(purpose)
            else:
                self._slots[purpose] = slots

    def _common_slots(self, claims: list[Claim | None]) -> list[int] | None:
        """Return the slot of each rank in the segment that all of them hold; None if there is none.

        All ranks of the host compute the same answer.
        """
        found = [claim for claim in claims if claim is not None]
        nonce, born, _ = found[0]
        is_same = len(found) == len(claims) and all(
            (each[0], each[1]) == (nonce, born) for each in found
        )
        return [slot for _, _, slot in found] if is_same and self._has_page(born) else None

    def _has_page(self, born: int) -> bool:
        return 0 < self._generation - born < NUM_PAGES

    def get(
        self,
        purpose: str,
        ranks: Sequence[int],
        sizes: Sizes,
        store: Store,
        local_rank: int,
        seconds: float,
        check: Callable[[], None] | None = None,
    ) -> HostMemory:
        """Return the memory of the group of this purpose, on our host.

        ranks: those of the group on our host, as numbers of the world; all of them call this
        together. The other arguments are for new memory; see `share`.
        """
        size = len(ranks)
        if purpose in self._used or tuple(ranks) != self._ranks:
            # Its page is in use, or was; or the group has other members.
            return new_memory(store, local_rank, size, sizes, seconds, check)
        self._used.add(purpose)
        if purpose in self._slots:
            kept, slots = self._held[purpose], self._slots[purpose]
        else:
            nbytes = sizes.total(NUM_PAGES, size)
            segment = _segment(store, local_rank, size, nbytes, seconds, check)
            kept, slots = KeptSegment(segment, sizes, self._generation, local_rank), [*range(size)]
            self._memory.segments[purpose] = kept
        page = self._generation - kept.born
        return kept.sizes.cut(kept.segment.view, page, NUM_PAGES, slots)


def new_memory(
    store: Store,
    rank: int,
    size: int,
    sizes: Sizes,
    seconds: float,
    check: Callable[[], None] | None = None,
) -> HostMemory:
    """Return memory for one group that is not used again; see `share` for the arguments."""
    segment = _segment(store, rank, size, sizes.total(1, size), seconds, check)
    return sizes.cut(segment.view, 0, 1, range(size))


def _segment(
    store: Store,
    rank: int,
    size: int,
    nbytes: int,
    seconds: float,
    check: Callable[[], None] | None,
) -> Segment:
    """Return a segment of all ranks; of private memory if there is only one."""
    if size > 1:
        return share(store, rank, size, nbytes, seconds, check)
    return Segment(memoryview(mmap.mmap(-1, nbytes)), nbytes, secrets.token_hex(8))
