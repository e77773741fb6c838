"""Claims on private memory: each sample once, whatever is killed in the middle of a claim."""

import sys
from types import FrameType
from typing import Any

import pytest

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
        raise AssertionError("the lock is free")

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


@pytest.mark.parametrize("takes_over", [False, True])
@pytest.mark.parametrize("is_noticed", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_each_sample_once_with_a_kill_at_each_line(
    takes_over: bool, is_noticed: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Party 1 is killed before each line of `next`, where it takes new or open samples.

    The others notice it at once, or after they have taken one claim each.
    """
    monkeypatch.setattr(module, "OPEN", 4)
    for line in range(1, 300):
        world = World(steps)
        world.begin(0, 30, 3, epoch=20)
        done: list[int] = []
        if takes_over:
            world.parties[2].next()
            world.lost.add(2)
        living = [0] if takes_over else [0, 2]
        kill_at(line)
        try:
            world.parties[1].next()
            sys.settrace(None)
            break
        except Killed:
            world.lost |= {1} if is_noticed else set()
        for rank in living:
            claims = [world.parties[rank].next()]
            while not claims[-1].is_last:
                claims.append(world.parties[rank].next())
            for claim in claims:
                done += range(claim.start, claim.start + claim.count)
            world.parties[rank].close(world.parties[rank].block_of(claims[0].start)[0])
        world.lost.add(1)
        for start, count in world.take_all(0):
            done += range(start, start + count)
        assert sorted(done) == list(range(30)), line
    else:
        pytest.fail("next() executes more lines than this test assumes")
    assert line > 30
