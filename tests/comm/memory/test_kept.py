"""Memory that survivors use again: every generation finds zeros, and every rank the same memory.

The ranks are threads of this process, each with its own `KeptMemory`; the segments are real.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore

from allstep.comm.memory.kept import NUM_PAGES, HostMemory, KeptMemory, Sizes, WorldMemory
from conftest import SOAK

SIZES = Sizes(control=200, pool=5000, common=100)


class Host:
    """The workers of a host, by ticket, through generations."""

    def __init__(self, tickets: list[int]) -> None:
        self.kept = {ticket: KeptMemory() for ticket in tickets}
        self.generation = -1
        self._store = HashStore()
        self._pool = ThreadPoolExecutor(8)

    def claims(self) -> dict[int, Any]:
        return {rank: self.kept[ticket].claims() for rank, ticket in enumerate(self.kept)}

    def form(self, purposes: list[str], failing: frozenset[int] = frozenset()) -> list[Any]:
        """Form the next generation; return the memory of each rank, by purpose.

        failing: ranks that do not come so far to get memory that exists.
        """
        self.generation += 1
        claims = self.claims()
        worlds = [WorldMemory(self.generation, claims, kept) for kept in self.kept.values()]
        if failing:
            # What exists needs no other rank. New memory is made by all or by none.
            purposes = [each for each in purposes if each in worlds[0]._slots]
        return [
            [
                each.result(20)
                for each in [
                    self._pool.submit(self._get, world, rank, purpose)
                    for rank, world in enumerate(worlds)
                    if rank not in failing
                ]
            ]
            for purpose in purposes
        ]

    def _get(self, world: WorldMemory, rank: int, purpose: str) -> HostMemory:
        store = PrefixStore(f"{self.generation}/{purpose}", self._store)
        return world.get(purpose, range(len(self.kept)), SIZES, store, rank, 20.0)


def check(memories: list[HostMemory], number: int) -> None:
    """Check that the memory is new in this generation, and the same for all; leave it full."""
    assert all(not any(memory.control) for memory in memories)
    for rank, memory in enumerate(memories):
        assert len(memory.pools) == len(memories)
        memory.control[rank : rank + 1] = bytes([number])
        memory.pools[rank][:] = bytes([rank + 1]) * SIZES.pool
    for memory in memories:
        assert bytes(memory.control[: len(memories)]) == bytes([number]) * len(memories)
        assert [set(pool) for pool in memory.pools] == [{rank + 1} for rank in range(len(memories))]
    memories[0].control[:] = b"\xff" * SIZES.control


@pytest.mark.timeout(300)
@settings(max_examples=2000 if SOAK else 40, deadline=None)
@given(st.data())
def test_memory_through_losses_joins_and_broken_worlds(data: st.DataObject) -> None:
    host = Host(list(range(data.draw(st.integers(1, 5)))))
    next_ticket = 100
    for _ in range(data.draw(st.integers(1, 24))):
        failing: frozenset[int] = frozenset()
        match data.draw(st.sampled_from(["lose", "lose", "stay", "join", "broken", "drop"])):
            case "lose" if len(host.kept) > 1:
                del host.kept[data.draw(st.sampled_from(sorted(host.kept)))]
            case "join" if len(host.kept) < 6:
                host.kept[next_ticket] = KeptMemory()
                next_ticket += 1
            case "broken":
                failing = frozenset(data.draw(st.sets(st.integers(0, len(host.kept) - 1))))
            case "drop":
                host.kept[data.draw(st.sampled_from(sorted(host.kept)))].drop("gradients")
        memories = host.form(["default", "gradients"], failing)
        if not failing:
            for each in memories:
                check(each, host.generation % 200 + 1)
        else:
            for each in memories:
                for memory in each:
                    memory.control[:] = b"\xee" * SIZES.control


def nonces(host: Host) -> set[str]:
    return {kept.segments["default"].segment.nonce for kept in host.kept.values()}


def test_a_loss_needs_no_new_memory_until_the_pages_are_used_up() -> None:
    host = Host([0, 1, 2])
    check(host.form(["default"])[0], 1)
    first = nonces(host)
    del host.kept[1]
    for _ in range(NUM_PAGES - 1):
        (memories,) = host.form(["default"])
        check(memories, 1)
        assert nonces(host) == first
    check(host.form(["default"])[0], 1)
    assert nonces(host) != first


def test_a_joining_worker_means_new_memory_for_all() -> None:
    host = Host([0, 1])
    host.form(["default"])
    first = nonces(host)
    host.kept[2] = KeptMemory()
    (memories,) = host.form(["default"])
    check(memories, 1)
    assert len(nonces(host)) == 1
    assert not nonces(host) & first


def test_a_second_group_of_one_purpose_has_memory_of_its_own() -> None:
    """Its page would not be zero."""
    host = Host([0])
    ((first,),) = host.form(["default"])
    world = WorldMemory(1, {0: host.kept[0].claims()}, host.kept[0])
    memories = [world.get("default", [0], SIZES, HashStore(), 0, 1.0) for _ in range(2)]
    memories[0].control[0] = 1
    assert memories[1].control[0] == 0
    assert first.control[0] == 0


def test_ranks_that_hold_different_memory_make_new_memory() -> None:
    """A world ended while only some of its ranks had made their memory."""
    host = Host([0, 1])
    host.form(["default"])
    first = nonces(host)
    host.kept[1].drop("default")
    (memories,) = host.form(["default"])
    check(memories, 1)
    assert len(nonces(host)) == 1
    assert not nonces(host) & first
