"""Collectives in shared memory: against sums in the order of ranks, bit for bit; mismatches; ranks
that die."""

import contextlib
import fcntl
import os
import random
import signal
import time
from pathlib import Path

import pytest

from support.ranks import Ranks, shared_memory_files, wait_until

SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"]
# Around every edge: one element, the small path's limit, a slice, a block, several blocks, and
# nothing that divides.
SIZES = [1, 2, 7, 1023, 16384, 16385, 65536, 65537, 131072, 200_003, 524_288, 1_000_003]


def group_of_ours():
    """The default group on backend allstep, with its shared-memory transport."""
    import torch
    import torch.distributed as dist

    import allstep.comm  # noqa: F401
    from allstep import wire
    from allstep.comm.join.launcher_store import WireStore
    from allstep.world import World

    torch.set_num_threads(1)
    world = World.detect()
    client = wire.Client(
        wire.parse_addresses(os.environ["ALLSTEP_STORE"]), os.environ["ALLSTEP_TOKEN"]
    )
    from datetime import timedelta

    store = WireStore(client, timedelta(seconds=30))
    seconds = float(os.environ.get("GROUP_SECONDS", "30"))
    dist.init_process_group(
        "allstep",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=seconds),
    )
    group = dist.distributed_c10d._get_default_group()
    group.kept = store
    return group


def input_of(rank: int, dtype: str, numel: int, seed: int):
    import torch

    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    if kind.is_floating_point:
        return (torch.randn(numel, generator=generator, dtype=torch.float64) * 3).to(kind)
    return torch.randint(-4 if kind != torch.uint8 else 0, 5, (numel,), generator=generator).to(
        kind
    )


def in_rank_order(op: str, inputs: list):
    """What one process would compute: rank 0, then 1, ..."""
    import torch

    combine = {
        "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
        "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }[op]  # fmt: skip
    total = inputs[0].clone()
    for value in inputs[1:]:
        total = combine(total, value)
    return total / len(inputs) if op == "AVG" else total


def check_all_reduce(cases: list) -> int:
    import torch
    import torch.distributed as dist

    group = group_of_ours()
    assert group.local is not None
    taken = 0
    for seed, (dtype, op, numel) in enumerate(cases):
        inputs = [input_of(rank, dtype, numel, seed) for rank in range(dist.get_world_size())]
        mine = inputs[dist.get_rank()].clone()
        before = group.local.flags.count
        dist.all_reduce(mine, getattr(dist.ReduceOp, op))
        taken += group.local.flags.count > before
        expected = in_rank_order(op, inputs)
        assert torch.equal(mine, expected.to(mine.dtype)), (dtype, op, numel, mine, expected)
    return taken


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
@pytest.mark.soak(3)
def test_all_reduce_has_the_bits_of_one_process(ranks: Ranks, num_ranks: int) -> None:
    draw = random.Random(num_ranks + 100 * int.from_bytes(os.urandom(2)) if SOAK else num_ranks)
    cases = [("float32", "SUM", numel) for numel in SIZES]
    for _ in range(200 if SOAK else 25):
        dtype = draw.choice(DTYPES)
        whole = dtype in ("int64", "int32", "int16", "int8", "uint8")
        op = draw.choice(
            [
                "SUM",
                "MIN",
                "MAX",
                "PRODUCT",
                *(
                    ["BAND", "BOR", "BXOR"]
                    if whole
                    else ["AVG"]
                    if dtype in ("float32", "float64")
                    else []
                ),
            ]
        )
        cases.append((dtype, op, draw.choice([*SIZES, draw.randint(1, 300_000)])))
    taken = ranks(num_ranks, check_all_reduce, cases, timeout=150)
    assert taken == [len(cases)] * num_ranks  # none went to Gloo


def test_reductions_are_told_apart_by_their_hash() -> None:
    """Plans are looked up by it, because comparing torch's objects is slow."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import AllreduceOptions

    def seen(name: str) -> int:
        opts = AllreduceOptions()
        opts.reduceOp = getattr(dist.ReduceOp, name)
        return hash(opts.reduceOp)

    names = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    assert len({seen(name) for name in names}) == len(names)
    assert [seen(name) for name in names] == [seen(name) for name in names]


def test_a_small_pool_is_enough_for_any_size(ranks: Ranks) -> None:
    cases = [("float64", "SUM", numel) for numel in (100_000, 1_000_003)]
    assert ranks(3, check_all_reduce, cases, env={"ALLSTEP_POOL_MB": "1"}) == [2, 2, 2]
    outcome = ranks.outcomes(2, check_all_reduce, cases, env={"ALLSTEP_POOL_MB": "many"})[0]
    assert "ALLSTEP_POOL_MB='many'" in outcome.output


def test_broadcast_and_odd_tensors(ranks: Ranks) -> None:
    def check() -> bool:
        import torch
        import torch.distributed as dist

        group_of_ours()
        rank, size = dist.get_rank(), dist.get_world_size()
        for numel in SIZES:
            for root in range(size):
                tensor = input_of(rank, "float32", numel, root)
                dist.broadcast(tensor, root)
                assert torch.equal(tensor, input_of(root, "float32", numel, root))
        matrix = torch.arange(12.0).reshape(3, 4).t() * (rank + 1)  # not contiguous
        dist.all_reduce(matrix)
        assert torch.equal(matrix, torch.arange(12.0).reshape(3, 4).t() * 6)
        column = torch.zeros(3, 4)
        column[:, 1] = rank
        dist.broadcast(column[:, 1], 2)
        assert column.sum() == 6
        scalar = torch.tensor(float(rank))
        dist.all_reduce(scalar)
        assert scalar.item() == 3.0
        weight = torch.ones(4, 3, 5, 5).to(memory_format=torch.channels_last) * rank
        dist.all_reduce(weight)
        assert (weight == 3).all()
        assert weight.is_contiguous(memory_format=torch.channels_last)
        needs_grad = torch.ones(3, requires_grad=True)
        dist.all_reduce(needs_grad)
        assert needs_grad.tolist() == [3.0, 3.0, 3.0]
        dist.all_reduce(torch.ones(0))
        dist.barrier()
        return True

    assert all(ranks(3, check, timeout=150))


def test_operations_that_do_not_wait(ranks: Ranks) -> None:
    """Put in line, waited for in any order, mixed with ones that wait, and with their futures."""

    def check() -> bool:
        import torch
        import torch.distributed as dist

        group_of_ours()
        rank, size = dist.get_rank(), dist.get_world_size()
        for trial in range(20):
            tensors = [
                torch.full((numel,), float(rank + index))
                for index, numel in enumerate([10, 100_000, 7, 300_000, 1])
            ]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            direct = torch.ones(5)
            if trial % 2:
                dist.all_reduce(direct)
            order = list(range(5))
            random.Random(trial * 7 + rank).shuffle(order)
            for index in order:
                if trial % 3:
                    works[index].wait()
                else:
                    assert works[index].get_future().wait()[0] is tensors[index]
            for index, tensor in enumerate(tensors):
                assert (tensor == sum(range(size)) + size * index).all()
                assert works[index].is_completed()
            if trial % 2:
                assert (direct == size).all()
        return True

    assert all(ranks(3, check, timeout=150))


def test_ranks_that_call_different_things_all_see_what_each_called(ranks: Ranks) -> None:
    def check() -> list[str]:
        import torch
        import torch.distributed as dist

        from allstep.errors import CollectiveMismatch

        group_of_ours()
        rank = dist.get_rank()
        texts = []
        different = [
            lambda: dist.all_reduce(torch.ones(3 + (rank == 1))),
            lambda: dist.all_reduce(
                torch.ones(3, dtype=torch.float64 if rank == 2 else torch.float32)
            ),
            lambda: dist.all_reduce(torch.ones(2, 3) if rank else torch.ones(3, 2)),
            lambda: (
                dist.broadcast(torch.ones(3), 0) if rank == 0 else dist.all_reduce(torch.ones(3))
            ),
            lambda: dist.all_reduce(
                torch.ones(3), dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM
            ),
            lambda: dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(1_000_000)),
        ]
        for act in different:
            try:
                act()
                raise AssertionError("no error")
            except CollectiveMismatch as error:
                texts.append(str(error))
            total = torch.ones(2)
            dist.all_reduce(total)  # the group is still usable
            assert total.tolist() == [3.0, 3.0]
        return texts

    by_rank = ranks(3, check)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    first = by_rank[0][0]
    assert "rank 0: all_reduce(float32 [3], SUM)" in first
    assert "rank 1: all_reduce(float32 [4], SUM)" in first
    assert "rank 1: barrier" in by_rank[0][5]


DEEDS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(3),
    "stops": lambda: (_ for _ in ()).throw(ValueError("stop")),
}


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("numel", [100, 3_000_000])
@pytest.mark.soak(20)
def test_a_rank_that_dies_is_lost_for_the_others_within_a_second(
    ranks: Ranks, deed: str, numel: int
) -> None:
    act = DEEDS[deed]
    moment = random.random() * 0.2

    def work() -> tuple:
        import torch
        import torch.distributed as dist

        from allstep.errors import PeerLost

        group_of_ours()
        tensor = torch.ones(numel)
        dist.all_reduce(tensor)
        started = time.monotonic()
        try:
            while True:
                dist.all_reduce(tensor)
                if dist.get_rank() == 1 and time.monotonic() - started > moment:
                    died = time.time()
                    with open("died", "w") as file:  # noqa: PTH123
                        file.write(str(died))
                    act()
        except PeerLost as error:
            noticed = time.time()
            try:
                dist.all_reduce(tensor)
                again = False
            except PeerLost:
                again = True
            with open("died") as file:  # noqa: PTH123
                return (
                    error.peer,
                    noticed - float(file.read()),
                    again,
                    "all_reduce(float32" in str(error),
                )

    outcomes = ranks.outcomes(3, work)
    assert outcomes[1].exit_code != 0
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.exit_code == 0, outcome.output
        peer, seconds, again, named = outcome.result
        assert (peer, again, named) == (1, True, True)
        assert seconds < 20  # promised: 1 s; the machine may stand still for a while
    wait_until(lambda: not shared_memory_files(), what="an empty /dev/shm")


def test_a_file_in_the_making_survives_the_sweep_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from allstep.comm.memory import segment

    lock, swept = fcntl.flock, []

    def late(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.append(list(tmp_path.iterdir()))
            segment.sweep()
        lock(fd, how)

    monkeypatch.setattr(segment, "_SHM", tmp_path)
    monkeypatch.setattr(fcntl, "flock", late)
    with contextlib.ExitStack() as cleaning:
        _, path = segment._make_file(4096, "number", cleaning)
        assert swept == [[Path(path)]] and Path(path).stat().st_size == 4096
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    def work() -> tuple:
        import torch
        import torch.distributed as dist

        from allstep.errors import CollectiveTimeout

        group_of_ours()
        dist.all_reduce(torch.ones(1))
        heard = [Path(f"heard.{rank}") for rank in range(2)]
        if dist.get_rank() == 2:
            wait_until(lambda: all(file.exists() for file in heard), 60)
            return ()
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1))
        except CollectiveTimeout as error:
            heard[dist.get_rank()].touch()
            return str(error), time.monotonic() - started
        return ("nothing happened",)

    results = ranks(3, work, env={"GROUP_SECONDS": "2"})
    for text, seconds in results[:2]:
        assert "rank 2 did not arrive within 2." in text
        assert seconds < 20


def test_unmodified_ddp_trains_as_on_gloo(ranks: Ranks) -> None:
    def train(backend: str) -> list[float]:
        import torch
        import torch.distributed as dist
        from torch import nn

        group = group_of_ours()
        if backend == "gloo":
            group.local = None
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 700), nn.ReLU(), nn.Linear(700, 300), nn.ReLU(), nn.Linear(300, 10)
        )
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        for _ in range(10):
            data = torch.randn(16, 64, generator=generator)
            loss = ddp(data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        digest = sum(parameter.double().sum().item() for parameter in model.parameters())
        return [*losses, digest]

    ours, gloos = ranks(2, train, "allstep", timeout=150), ranks(2, train, "gloo", timeout=150)
    assert ours[0][-1] == ours[1][-1]  # the ranks hold the same bits
    assert ours[0] == pytest.approx(gloos[0], rel=1e-5)


def test_tensors_in_shared_memory(ranks: Ranks) -> None:
    def check() -> bool:
        import gc
        import io

        import torch
        import torch.distributed as dist

        from allstep.comm import shared_empty

        group = group_of_ours()
        rank, size = dist.get_rank(), dist.get_world_size()
        for seed, (dtype, numel) in enumerate(
            [("float32", 1_000_003), ("float16", 300_001), ("int64", 70_000), ("float64", 5)]
        ):
            inputs = [input_of(other, dtype, numel, seed) for other in range(size)]
            mine = shared_empty(numel, getattr(torch, dtype))
            private = inputs[rank].clone()
            for _ in range(3):
                mine.copy_(inputs[rank])
                dist.all_reduce(mine)
                assert torch.equal(mine, in_rank_order("SUM", inputs))
            # A part of it, another shape, and ranks of which only some use shared memory.
            mine.copy_(inputs[rank])
            part = mine[1 : numel // 2 + 3]
            dist.all_reduce(part)
            assert torch.equal(part, in_rank_order("SUM", inputs)[1 : numel // 2 + 3])
            assert torch.equal(mine[numel // 2 + 3 :], inputs[rank][numel // 2 + 3 :])
            mine.copy_(inputs[rank])
            mixed = mine if rank == 0 else private
            dist.all_reduce(mixed)
            assert torch.equal(mixed, in_rank_order("SUM", inputs))
        average = shared_empty((300, 500))
        average.fill_(rank)
        handle = dist.all_reduce(average, dist.ReduceOp.AVG, async_op=True)
        handle.wait()
        assert (average == 1.0).all()
        file = io.BytesIO()
        torch.save(shared_empty(100), file)
        assert len(file.getvalue()) < 4000  # its own storage, not the segment's
        del mine, part, mixed, average, handle
        gc.collect()
        assert not group.local.plans.blocks
        assert not any(plan and plan.shared for plan in group.local.plans._plans.values())
        return True

    assert all(ranks(3, check, timeout=150))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_scaled_sum_of_which_only_some_lies_in_shared_memory_is_scaled_once(
    ranks: Ranks, num_ranks: int
) -> None:
    def check() -> bool:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import _make_nccl_premul_sum

        from allstep.comm.group.shared_empty import shared_empty

        group_of_ours()
        rank, size = dist.get_rank(), dist.get_world_size()
        inputs = [input_of(other, "float32", 900_001, 1) for other in range(size)]
        mine = shared_empty(900_001) if rank == 0 else torch.empty(900_001)
        shared_empty(900_001) if rank else None
        mine.copy_(inputs[rank])
        dist.all_reduce(mine, _make_nccl_premul_sum(0.5))
        return torch.equal(mine, in_rank_order("SUM", [0.5 * each for each in inputs]))

    assert all(ranks(num_ranks, check))


def test_shared_tensors_that_do_not_fit(ranks: Ranks) -> None:
    def check() -> str:
        import torch
        import torch.distributed as dist

        from allstep.comm import shared_empty
        from allstep.errors import CommError

        group_of_ours()
        try:
            shared_empty(1 << 50, torch.uint8)
        except CommError as error:
            text = str(error)
        total = torch.ones(1)
        dist.all_reduce(total)
        return text if total.item() == 2.0 else "broken"

    for text in ranks(2, check):
        assert "bytes of shared memory do not fit" in text


def test_without_memfd_a_file_is_used_and_nothing_stays(ranks: Ranks) -> None:
    def check() -> bool:
        import torch
        import torch.distributed as dist

        from allstep.comm.memory import segment

        def refuse(*_: object) -> tuple[int, str]:
            raise OSError("no memfd here")

        segment._make_memfd = refuse
        left = f"/dev/shm/allstep-{os.getuid()}-left-by-a-kill"
        with open(left, "w"):  # noqa: PTH123
            pass
        group = group_of_ours()
        total = torch.ones(200_000)
        dist.all_reduce(total)
        return group.local is not None and bool((total == 2).all()) and not os.path.exists(left)  # noqa: PTH110

    assert ranks(2, check) == [True, True]
    wait_until(lambda: not shared_memory_files(), what="an empty /dev/shm")


def test_hosts_that_are_apart_do_not_share(ranks: Ranks) -> None:
    def check() -> bool:
        import torch
        import torch.distributed as dist

        group = group_of_ours()
        total = torch.ones(3)
        dist.all_reduce(total)
        return group.local.arena.size == 1 and total.tolist() == [2.0] * 3

    assert ranks(2, check, hosts=["a", "b"]) == [True, True]


def test_sub_groups_share_by_themselves(ranks: Ranks) -> None:
    def check() -> list[float]:
        import torch
        import torch.distributed as dist

        group_of_ours()
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([1, 2])]
        sums = []
        for _ in range(3):
            for pair in pairs:
                if rank in dist.get_process_group_ranks(pair):
                    value = torch.tensor([float(rank)])
                    dist.all_reduce(value, group=pair)
                    sums.append(value.item())
        return sums

    assert ranks(4, check) == [[1.0] * 3, [1.0, 3.0] * 3, [5.0, 3.0] * 3, [5.0] * 3]


def test_a_dataloader_of_forked_workers_disturbs_nobody(ranks: Ranks) -> None:
    def check() -> float:
        import torch
        import torch.distributed as dist

        group_of_ours()
        total = torch.ones(10)
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(1)
            dist.all_reduce(total)
            os.waitpid(child, 0)
        return total.sum().item()

    assert ranks(2, check) == [320.0, 320.0]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_may_have_a_factor_of_its_own(ranks: Ranks, num_ranks: int) -> None:
    """PREMUL_SUM: how gradients are weighted by samples. Small, in blocks, and where it lies."""

    def check() -> int:
        import torch
        import torch.distributed as dist

        import allstep.comm

        group = group_of_ours()
        rank, size = dist.get_rank(), dist.get_world_size()
        taken = 0
        for numel in (5, 70_001, 1_000_003):
            for make in (torch.empty, allstep.comm.shared_empty):
                inputs = [input_of(each, "float32", numel, numel) for each in range(size)]
                tensor = make(numel).copy_(inputs[rank])
                before = group.local.flags.count
                dist.all_reduce(tensor, dist._make_nccl_premul_sum(rank + 0.3))
                taken += group.local.flags.count > before
                expected = in_rank_order("SUM", [each * (r + 0.3) for r, each in enumerate(inputs)])
                assert torch.equal(tensor, expected)
        return taken

    assert ranks(num_ranks, check) == [6] * num_ranks
