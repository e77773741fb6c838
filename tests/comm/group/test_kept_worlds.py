"""Real workers that lose members: their groups use the memory again, and Gloo only on demand."""

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import allstep.torch as hvd
from allstep import comm
from allstep.comm.group.init import group_for
from allstep.comm.memory.kept import kept_memory
from allstep.comm.network.gloo_on_demand import GlooOnDemand
from allstep.engine.start import current
from allstep.errors import PeerLost
from allstep.hvd.exceptions import HorovodInternalError
from support.generations import Generations, note, run_generations
from support.ranks import Ranks, describe


def nonces() -> dict[str, str]:
    return {purpose: claim[0] for purpose, claim in kept_memory().claims().items()}


def num_segments() -> int:
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:allstep" in line or "/dev/shm/allstep" in line for line in lines)


def check_sums(world: Any) -> None:
    """Sum small and large tensors over all ranks, on three groups."""
    total = world.size * (world.size + 1) / 2
    for numel in (3, 1000, 300_001):
        for group in (None, group_for("engine"), group_for("gradients")):
            values = torch.full((numel,), world.rank + 1.0)
            dist.all_reduce(values) if group is None else group.allreduce([values]).wait()
            assert (values == total).all()
            later = torch.full((numel,), world.rank + 1.0)
            if group is None:
                dist.all_reduce(later, async_op=True).wait()
                assert (later == total).all()


def shrink_to_one() -> list[Any]:
    """Sum until a rank is lost, in each world; return its size, memory and maps."""
    world, found = comm.init(), []
    while True:
        check_sums(world)
        found.append((world.size, nonces(), num_segments()))
        note(f"formed/{world.generation}")
        if world.size == 1:
            return found
        try:
            while True:
                dist.all_reduce(torch.ones(100_000))
        except PeerLost:
            world = comm.rejoin()


@pytest.mark.parametrize("order", ["adcb", "dbca"])
def test_survivors_keep_their_memory(ranks: Ranks, order: str) -> None:
    """Four workers die one by one, the first, the last and ones in the middle."""

    def change(launcher: Generations) -> None:
        left = list("abcd")
        for victim in order:
            launcher.form(left)
            launcher.wait_for_notes(f"formed/{launcher.generation}", left)
            if len(left) == 1:
                return
            launcher.kill(victim)
            launcher.wait_for_exit(victim)
            launcher.end(f"lost worker {victim}")
            left.remove(victim)

    outcomes = run_generations(ranks, list("abcd"), shrink_to_one, change)
    last = outcomes[order[-1]]
    assert last.exit_code == 0, describe(last)
    sizes, memories, maps = zip(*last.result, strict=True)
    assert sizes == (4, 3, 2, 1)
    assert len(memories[0]) == 3
    assert all(each == memories[0] for each in memories)
    assert set(maps) == {3}
    assert not list(Path("/dev/shm").glob("allstep-*"))


def use_gloo() -> dict[str, Any]:
    """Call what shared memory declines, in a world of a generation; return the results."""
    world = comm.init()
    rank, size, group = world.rank, world.size, dist.group.WORLD
    assert isinstance(group.far, GlooOnDemand)
    found: dict[str, Any] = {}
    # Only two of the ranks: the others connect in the background.
    if rank < 2:
        value = torch.full((4,), float(rank))
        dist.send(value, 1) if rank == 0 else dist.recv(value, 0)
        found["sent"] = value.tolist()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    found["objects"] = gathered
    at_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object("x" * rank, at_root)
    found["at root"] = at_root
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
    dist.all_reduce(sparse)
    found["sparse"] = sparse.to_dense().tolist()
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(rank))).sum().backward()
    (weights,) = model.parameters()
    found["gradient"] = weights.grad.tolist()
    pair = dist.new_group([0, 1])
    if rank < 2:
        ones = torch.ones(3)
        dist.all_reduce(ones, group=pair)
        found["pair"] = ones.tolist()
    comm.shutdown()
    return found


def test_gloo_connects_when_it_is_needed(ranks: Ranks) -> None:
    outcomes = run_generations(ranks, list("abc"), use_gloo, lambda each: each.form(list("abc")))
    for rank, outcome in enumerate(outcomes.values()):
        assert outcome.exit_code == 0, describe(outcome)
        found = outcome.result
        assert found["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert found["at root"] == (["", "x", "xx"] if rank == 0 else None)
        assert found["sparse"] == [1.0, 1.0, 1.0]
        assert found["gradient"] == [[1.0, 1.0]]
        assert found.get("sent") == ([0.0] * 4 if rank < 2 else None)
        assert found.get("pair") == ([2.0] * 3 if rank < 2 else None)


def named_sums() -> list[Any]:
    """Sum by name through the engine, and train a step, in two worlds."""
    found: list[Any] = []
    for _ in range(2):
        hvd.init()
        weights = torch.nn.Parameter(torch.zeros(5))
        named = [("weights", weights)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), named)
        (weights * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="x").tolist()
        found.append((total, weights.tolist(), nonces()))
        note_of_engine("stepped")
        with contextlib.suppress(HorovodInternalError):
            while hvd.size() > 2:
                hvd.allreduce(torch.ones(3), name="y")
        hvd.shutdown()
    return found


def note_of_engine(text: str) -> None:
    engine = current()
    assert engine is not None
    engine._joined.rendezvous.store.set(f"{text}/{os.environ['ALLSTEP_TICKET']}", "")


def test_the_engine_keeps_its_memory(ranks: Ranks) -> None:
    def change(launcher: Generations) -> None:
        launcher.form(list("abc"))
        launcher.wait_for_notes("stepped", list("abc"))
        launcher.kill("a")
        launcher.wait_for_exit("a")
        launcher.end("lost rank 0")
        launcher.form(list("bc"))

    outcomes = run_generations(ranks, list("abc"), named_sums, change)
    for ticket in "bc":
        assert outcomes[ticket].exit_code == 0, describe(outcomes[ticket])
        (first, before, old), (second, after, new) = outcomes[ticket].result
        assert first == [3.0] * 3
        assert second == [2.0] * 3
        assert before == [-2.0] * 5
        assert after == [-1.5] * 5
        assert len(old) == 3
        assert new == old
