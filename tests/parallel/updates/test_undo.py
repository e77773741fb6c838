"""Shared weights of an elastic run: each survivor returns to its own last whole update.

References: a list of whole versions (the decision alone), and the same training without a loss.
"""

import copy
import mmap
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import allstep
from allstep.comm.group.init import group_for
from allstep.errors import CommError
from allstep.parallel.exchange import Named, Rule
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import ReplicatedOptimizer, replicate
from allstep.parallel.updates import ByOwners
from allstep.parallel.updates.undo import Undo, must_undo, number_bytes
from support.ranks import Ranks


@pytest.mark.parametrize(
    ("begun", "finished", "expected"), [(0, 0, False), (1, 0, True), (7, 7, False), (8, 7, True)]
)
def test_an_update_that_was_begun_but_not_finished_is_undone(
    begun: int, finished: int, expected: bool
) -> None:
    assert must_undo(begun, finished) is expected


@pytest.mark.parametrize("begun", [5, 8])
def test_another_number_is_an_error(begun: int) -> None:
    with pytest.raises(CommError, match=f"begun update {begun} while this one has finished 6"):
        must_undo(begun, 6)


class Host:
    """Owners of one number each, as programs that stop after each access to the memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        numbers = memoryview(mmap.mmap(-1, number_bytes(size)))
        self.undos = [Undo(numbers, rank) for rank in range(size)]
        self.contents: list[Any] = [0] * size
        self.copies: list[Any] = ["nothing"] * size
        self.met, self.reduced = [0] * size, [0] * size

    def train(self, rank: int) -> Generator[None]:
        """Update again and again; each reduction and each meeting waits for all ranks."""
        undo = self.undos[rank]
        while True:
            yield from self.wait(self.reduced, rank)
            self.copies[rank] = "half"
            yield
            self.copies[rank] = self.contents[rank]
            yield
            undo.begin()
            yield
            self.contents[rank] = "half"
            yield
            self.contents[rank] = undo.finished + 1
            yield
            yield from self.wait(self.met, rank)
            undo.finish()

    def wait(self, counts: list[int], rank: int) -> Generator[None]:
        counts[rank] += 1
        while min(counts) < counts[rank]:
            yield

    def leave(self, rank: int) -> Generator[None]:
        """Take the values of all owners, and check that they are of our last update."""
        undo, found = self.undos[rank], []
        for owner in range(self.size):
            content = self.contents[owner]
            yield
            is_undone = undo.is_undone(owner)
            yield
            found.append(self.copies[owner] if is_undone else content)
        assert found == [undo.finished] * self.size


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=300))
def test_a_rank_that_leaves_at_any_moment_takes_one_whole_update(
    size: int, turns: list[tuple[int, int]]
) -> None:
    """A rank that gets no further turns is dead or stopped; the others may still change theirs."""
    host = Host(size)
    programs = [host.train(rank) for rank in range(size)]
    leaving = set()
    for turn, chance in turns:
        rank = turn % size
        if chance == 0 and rank not in leaving:
            leaving.add(rank)
            programs[rank] = host.leave(rank)
        next(programs[rank], None)
    for rank in range(size):
        for _ in programs[rank] if rank in leaving else host.leave(rank):
            pass


class LostError(Exception):
    """A rank was lost within the update."""


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
}


class Training:
    """A small model with a replicated optimizer on this rank."""

    def __init__(self, name: str, kind: str, keeps_undo: bool) -> None:
        self.world = allstep.init()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5))
        self.model[0].to(memory_format=torch.channels_last)
        inner = OPTIMIZERS[kind](self.model.parameters())
        self.update = ByOwners(type(inner), keeps_undo)
        named = [Named(*each) for each in self.model.named_parameters()]
        replicas = Replicas(named, lambda: group_for("gradients"), lambda: name, Rule())
        self.optimizer: ReplicatedOptimizer = replicate(
            inner, replicas, self.world.size, self.update
        )

    def reduce(self, step: int) -> None:
        seed = torch.Generator().manual_seed(100 * step + self.world.rank)
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3, 6, 6, generator=seed)).square().mean().backward()
        self.optimizer.reduce_gradients()

    def step(self, step: int) -> None:
        self.reduce(step)
        self.optimizer.apply()

    def state(self) -> dict[str, Any]:
        """Return a copy of weights and state; between two steps."""
        found = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])
        # No rank may begin its update before all have read.
        dist.barrier()
        return {"weights": found[0], "state": found[1]["state"]}

    def lose(self, victim: int, step: int, passes: int | None) -> None:
        """Begin an update that `victim` does not finish; only `passes` passes its meeting."""
        sharing, rank = self.update.sharing(self.optimizer), self.world.rank

        def fail(*_: Any) -> None:
            raise LostError

        original = sharing.inner.step

        def spoil() -> None:
            original()
            for tensor in [*sharing.ranges.values()][: 1 + rank]:
                tensor.fill_(torch.nan)
            fail()

        self.reduce(step)
        sharing._state.gather = fail  # type: ignore[method-assign]
        if rank == victim:
            sharing.inner.step = spoil
        sharing.owners.meet = (lambda: None) if rank == passes else fail  # type: ignore[method-assign]
        if rank == passes:
            self.optimizer.apply()
        else:
            with pytest.raises(LostError):
                self.optimizer.apply()
        dist.barrier()
        self.optimizer.close()


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    else:
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


def lose_within(kind: str, last: int, victim: int) -> None:
    reference, ours = Training("reference", kind, False), Training("ours", kind, True)
    for step in range(1, last):
        reference.step(step)
        ours.step(step)
    before = reference.state()
    ours.lose(victim, last, None)
    found = ours.state()
    assert_same(found, before)
    # The next world repeats the update and shares the weights again.
    ours.optimizer.attach("again", ours.world.size)
    for step in (last, last + 1):
        reference.step(step)
        ours.step(step)
    assert ours.optimizer.owners is not None
    assert_same(ours.state(), reference.state())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("last", "victim"), [(1, 1), (3, 0), (3, 1), (3, 2)])
def test_an_update_that_one_owner_left_half_done_is_undone(
    ranks: Ranks, kind: str, last: int, victim: int
) -> None:
    """Also the first update, whose state is not in shared memory yet."""
    ranks(3, lose_within, kind, last, victim)


def test_on_two_hosts(ranks: Ranks) -> None:
    ranks(3, lose_within, "sgd", 2, 1, hosts=["a", "a", "b"])


def pass_alone() -> None:
    reference, ours = Training("reference", "sgd", False), Training("ours", "sgd", True)
    for step in (1, 2):
        reference.step(step)
        ours.step(step)
    before = reference.state()
    reference.step(3)
    after = reference.state()
    ours.lose(-1, 3, passes=0)
    assert_same(ours.state(), after if ours.world.rank == 0 else before)


def test_a_rank_that_has_passed_the_meeting_keeps_the_update(ranks: Ranks) -> None:
    ranks(3, pass_alone)


def alone_and_again() -> None:
    reference, ours = Training("reference", "sgd", False), Training("ours", "sgd", True)
    ours.optimizer.attach("alone", 1)
    assert ours.optimizer.owners is None
    ours.optimizer.attach("again", ours.world.size)
    for training in (reference, ours):
        training.step(1)
    assert_same(ours.state(), reference.state())


def test_a_world_of_one_rank_shares_nothing(ranks: Ranks) -> None:
    ranks(2, alone_and_again)


def without_undo() -> None:
    training = Training("fixed", "sgd", False)
    training.step(1)
    sharing = training.update.sharing(training.optimizer)
    assert sharing.parameters.undo is None
    assert not sharing.parameters._copies and not sharing._state._area.copies


def test_a_fixed_world_keeps_no_undo_copy(ranks: Ranks) -> None:
    ranks(2, without_undo)
