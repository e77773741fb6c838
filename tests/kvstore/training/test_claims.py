"""Claims on private memory: each sample once, whatever is killed in the middle of a claim."""

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import UserError
from allstep.kvstore.memory.bounded_wait import BoundedWait
from allstep.kvstore.training import claims as module
from allstep.kvstore.training.claims import OPEN, Claims
from allstep.kvstore.training.push import Claim

pytestmark = pytest.mark.unit

SIZE = 3


class Killed(BaseException):
    """Ends a party where it is; nothing of it runs afterwards."""


class FreeLock:
    """Free again when its holder dies, like the locks in shared memory."""

    def acquire(self, seconds: float = 0.0) -> bool:
        return True

    def release(self) -> None:
        """No two parties of these tests lock it at once."""


class World:
    """Parties on one memory. lost: those that were killed; complete: the entries that they pushed."""

    def __init__(self, steps: int = 1, capacity: int = 100) -> None:
        memory = memoryview(bytearray(Claims.nbytes(SIZE)))
        self.lost: set[int] = set()
        self.complete: dict[int, int] = {}
        self.parties = [
            Claims(memory, FreeLock(), rank, SIZE, steps, capacity, self, self.no_wait)
            for rank in range(SIZE)
        ]

    def no_wait(self, text: str) -> BoundedWait:
        raise AssertionError("nobody holds the lock")

    def newly_lost(self) -> set[int]:
        return set(self.lost)

    def pushed_last(self, rank: int) -> int | None:
        return self.complete.get(rank)

    def begin(self, position: int, limit: int, share: int, epoch: int, number: int = 1) -> None:
        for party in self.parties:
            party.begin_round(number, position, limit, share, epoch)

    def take_all(self, rank: int) -> list[tuple[int, int]]:
        found = []
        while (claim := self.parties[rank].next()) is not None:
            found.append((claim.start, claim.count))
            if claim.is_last:
                self.parties[rank].close(self.parties[rank].block_of(claim.start)[0])
        return found


def test_claims_end_at_epochs_and_at_the_limit() -> None:
    world = World()
    world.begin(5, 27, 4, epoch=10)
    first, second, _ = world.parties
    assert [first.next(), second.next()] == [Claim(5, 4), Claim(9, 1)]
    assert world.take_all(2) == [(10, 4), (14, 4), (18, 2), (20, 4), (24, 3)]
    assert (first.next(), second.position, second.limit) == (None, 27, 27)


def test_a_stop_ends_the_round_at_what_is_claimed() -> None:
    world = World()
    world.begin(0, 100, 4, epoch=100)
    world.parties[0].next()
    assert world.parties[1].request_stop() == 4
    # A party that calls begin_round late does not undo it.
    world.parties[2].begin_round(1, 0, 100, 4, 100)
    assert [party.next() for party in world.parties] == [None] * 3


def test_the_order_log_limits_the_claims_of_a_round() -> None:
    world = World(capacity=3)
    world.begin(0, 100, 4, epoch=100)
    assert world.take_all(0) == [(0, 4), (4, 4), (8, 4)]
    world.begin(12, 100, 4, epoch=100, number=2)
    assert world.parties[1].next() == Claim(12, 4)


def test_a_block_of_lazy_is_given_out_again_as_a_whole() -> None:
    world = World(steps=3)
    world.begin(0, 30, 4, epoch=100)
    lost, other, _ = world.parties
    assert [lost.next(), lost.next()] == [Claim(0, 4, False), Claim(4, 4, False)]
    world.lost.add(0)
    assert [other.next() for _ in range(4)] == [
        Claim(0, 4, False),
        Claim(4, 4, False),
        Claim(8, 4, True),
        Claim(12, 4, False),
    ]
    assert other.num_open() == 0


def test_a_complete_push_is_not_given_out_again() -> None:
    world = World()
    world.begin(0, 8, 4, epoch=100)
    lost, other, _ = world.parties
    lost.next()
    lost.next()
    world.complete[0] = lost.block_of(0)[2]
    world.lost.add(0)
    assert other.num_open() == 1
    assert world.take_all(1) == [(4, 4)]


def test_misuse() -> None:
    world = World()
    world.begin(0, 10_000, 4, epoch=10_000)
    party = world.parties[0]
    with pytest.raises(UserError, match="no open claim from position 8"):
        party.block_of(8)
    for _ in range(100):
        party.next()
    with pytest.raises(UserError, match="has taken 100 claims, from position 0"):
        party.check_done()


def test_too_many_claims_ahead() -> None:
    world = World(capacity=1000)
    world.begin(0, 10_000, 4, epoch=10_000)
    for _ in range(OPEN):
        world.parties[0].next()
    with pytest.raises(UserError, match=f"has {OPEN} claims that it has not pushed"):
        world.parties[0].next()


def kill_at(line: int) -> None:
    """Raise Killed before the `line`th line that `Claims` executes from now on."""
    left = line

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            raise Killed
        return trace

    sys.settrace(trace)


@given(
    st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.booleans(), st.integers(1, 80)),
        max_size=25,
    ),
    st.integers(1, 2),
)
def test_each_sample_once_with_kills_at_any_line(
    program: list[tuple[int, bool, int]], steps: int
) -> None:
    """Two of three parties may be killed before any line of `next`; the last one takes the rest."""
    world = World(steps)
    world.begin(0, 60, 3, epoch=50)
    done: list[int] = []

    def finish(rank: int, claim: Claim) -> None:
        done.extend(range(claim.start, claim.start + claim.count))
        if claim.is_last:
            world.parties[rank].close(world.parties[rank].block_of(claim.start)[0])

    open_steps: dict[int, list[Claim]] = {rank: [] for rank in range(SIZE)}
    for rank, is_killed, line in program:
        if rank in world.lost:
            continue
        if is_killed and rank:
            kill_at(line)
        try:
            claim = world.parties[rank].next()
        except Killed:
            world.lost.add(rank)
            # What it had added up for a block that it did not push is lost.
            for each in open_steps[rank]:
                done[:] = [at for at in done if not 0 <= at - each.start < each.count]
            continue
        finally:
            sys.settrace(None)
        if claim is not None:
            open_steps[rank] = [] if claim.is_last else [*open_steps[rank], claim]
            finish(rank, claim)
    world.lost |= {1, 2}
    for rank in (1, 2):
        for each in open_steps[rank]:
            done[:] = [at for at in done if not 0 <= at - each.start < each.count]
    while (claim := world.parties[0].next()) is not None:
        finish(0, claim)
    assert sorted(done) == list(range(60))
