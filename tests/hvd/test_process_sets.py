"""Process sets, and what surrounds init() and shutdown(): on one process, and on ranks."""

import os
from pathlib import Path

import pytest
import torch

import allstep.torch as hvd
from allstep.torch import mpi_ops
from support.hvd_ranks import running
from support.ranks import Ranks


def test_a_set_before_it_is_registered() -> None:
    few = hvd.ProcessSet(iter([2, 0, 1]))
    assert few.ranks == [0, 1, 2] and few.process_set_id is None
    assert few.size() is None and few.rank() is None
    assert str(few) == "ProcessSet(process_set_id=None, ranks=[0, 1, 2], mpi_comm=None)"
    assert few != hvd.ProcessSet([0, 1, 2])
    for wrong in ([0, "1"], [0.5], 3):
        with pytest.raises(ValueError, match="ProcessSet"):
            hvd.ProcessSet(wrong)
    assert hvd.global_process_set.process_set_id == 0


def test_static_sets(ranks: Ranks) -> None:
    assert ranks(3, use_static_sets) == [[[0, 2], [1, 2]]] * 3


def use_static_sets() -> list[list[int]]:
    evens, late = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1, 2])
    assert hvd.global_process_set.ranks == []
    with running(process_sets=[evens, late]) as (rank, size):
        assert hvd.global_process_set.ranks == [0, 1, 2] and hvd.global_process_set.size() == size
        assert (evens.process_set_id, late.process_set_id) == (1, 2)
        assert (evens.size(), evens.included()) == (2, rank in (0, 2))
        if evens.included():
            assert evens.rank() == rank // 2
            total = hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=evens, name="sum")
            assert total.item() == 2
            assert (
                hvd.broadcast(torch.tensor(rank), 2, process_set=evens, name="from").item() == 2
            )  # a global rank
            assert hvd.broadcast_object(rank, 2, "object", evens) == 2
            gathered = hvd.allgather(torch.tensor([rank]), process_set=evens, name="all").tolist()
            average = hvd.allreduce(torch.tensor(float(rank)), process_set=evens, name="mean")
            assert (gathered, average.item()) == ([0, 2], 1.0)
            with pytest.raises(ValueError, match="invalid root rank"):
                hvd.broadcast(torch.tensor(1), 1, process_set=evens)
            hvd.barrier(evens)
        else:
            with pytest.raises(ValueError, match="not part of"):
                evens.rank()
            with pytest.raises(ValueError, match="is not a member"):
                hvd.barrier(evens)
        if late.included():
            scattered = hvd.reducescatter(torch.ones(3), op=hvd.Sum, process_set=late, name="rows")
            assert scattered.tolist() == [[2.0, 2.0], [2.0]][late.rank()]
        with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
            hvd.add_process_set([0])
        seen = [evens.ranks, late.ranks]
    assert evens.process_set_id is None  # it cannot be taken for a set of another init()
    return seen


def test_dynamic_sets(ranks: Ranks) -> None:
    ranks(3, use_dynamic_sets)


def use_dynamic_sets() -> None:
    with running(process_sets="Dynamic") as (_, size):
        assert os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] == "1"
        few = hvd.add_process_set([0, 1])
        other = hvd.add_process_set(hvd.ProcessSet([1, 2]))
        assert (few.process_set_id, other.process_set_id) == (1, 2)
        with pytest.raises(ValueError, match="duplicate process set"):
            hvd.add_process_set([1, 0])
        with pytest.raises(ValueError, match="duplicate process set"):
            hvd.add_process_set(range(size))
        for wrong, words in [([0, 3], "no rank 3"), ([0, 0], "twice"), ([-1], "no rank -1")]:
            with pytest.raises(ValueError, match=words):
                hvd.add_process_set(wrong)
        if few.included():
            assert (
                hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=few, name="in few").item() == 2
            )
        assert hvd.remove_process_set(few) is True
        assert few.process_set_id is None and few.size() is None
        assert hvd.remove_process_set(few) is False
        assert hvd.remove_process_set(hvd.global_process_set) is False
        again = hvd.add_process_set([0, 2])
        assert again.process_set_id == 1  # a number that is free again
        if again.included():
            assert (
                hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again, name="again").item()
                == 2
            )


def test_bad_sets_at_init(ranks: Ranks) -> None:
    ranks(2, begin_badly)


def begin_badly() -> None:
    for wrong in ([[0, 5]], [[0, 0]]):
        with pytest.raises(ValueError, match="initialization failed"):
            hvd.init(process_sets=[hvd.ProcessSet(ranks) for ranks in wrong])
        assert not hvd.is_initialized()
    for wrong in ("static", [[0, 1]]):
        with pytest.raises(ValueError, match="ProcessSet"):
            hvd.init(process_sets=wrong)
    first, second = hvd.ProcessSet([0]), hvd.ProcessSet([0])
    with pytest.raises(ValueError, match=r"process set 1 .* is a duplicate"):
        hvd.init(process_sets=[first, second])
    assert (first.process_set_id, second.process_set_id) == (1, None)
    assert hvd.is_initialized()  # the engine itself is up
    hvd.barrier()
    hvd.shutdown()
    whole = hvd.ProcessSet([0, 1])
    with pytest.raises(ValueError, match=r"process set 0 .* is a duplicate"):
        hvd.init(process_sets=[whole])
    hvd.barrier()
    hvd.shutdown()


def test_ranks_must_agree_on_the_sets(ranks: Ranks) -> None:
    ranks(2, disagree)


def disagree() -> None:
    with pytest.raises(ValueError, match="initialization failed: process sets differ"):
        hvd.init(process_sets=[hvd.ProcessSet([int(os.environ["RANK"])])])
    assert not hvd.is_initialized()


def test_the_place_in_the_world(ranks: Ranks) -> None:
    """Hosts a (2 ranks) and b (1): local rank 1 exists on one host only."""
    places = ranks(3, say_where, hosts=["a", "a", "b"])
    assert places == [
        [0, 3, 0, 2, 0, 2, False],
        [1, 3, 1, 2, 0, 1, False],
        [2, 3, 0, 1, 1, 2, False],
    ]
    assert ranks(2, say_where) == [[0, 2, 0, 2, 0, 1, True], [1, 2, 1, 2, 0, 1, True]]


def say_where() -> list[int]:
    names = [
        "rank",
        "size",
        "local_rank",
        "local_size",
        "cross_rank",
        "cross_size",
        "is_homogeneous",
    ]
    with running():
        return [getattr(mpi_ops, name)() for name in names]


def test_the_place_is_known_to_workers_of_a_data_loader(ranks: Ranks) -> None:
    assert ranks(2, load) == [[2, 2], [12, 12]]


class Places(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return 10 * hvd.rank() + hvd.size()


def load() -> list[int]:
    with running():
        loaded = [int(batch) for batch in torch.utils.data.DataLoader(Places(), num_workers=1)]
        hvd.allreduce(torch.ones(1))  # the workers' end has ended nothing here
        return loaded


class Communicator:
    """Looks like mpi4py's, as far as we look."""

    def __init__(self, rank: int, size: int) -> None:
        self.Get_rank, self.Get_size = lambda: rank, lambda: size


def test_comm(ranks: Ranks) -> None:
    ranks(2, begin_with_a_communicator)


def begin_with_a_communicator() -> None:
    rank = int(os.environ["RANK"])
    for comm in ([], [1, 0], Communicator(rank, 2)):
        with running(comm=comm) as (_, size):
            assert size == 2
    with pytest.warns(UserWarning, match=r"comm=\[0\]\) is ignored"):
        hvd.init(comm=[0])
    assert hvd.size() == 2
    with pytest.raises(ValueError, match="rank 0 of 1, the world has"):
        hvd.init(comm=Communicator(0, 1))
    with pytest.raises(ValueError, match="mpi4py communicator"):
        hvd.init(comm=object())
    hvd.barrier()
    hvd.shutdown()


def test_what_is_built() -> None:
    assert (hvd.gloo_built(), hvd.gloo_enabled()) == (True, True)
    assert not any(
        [
            hvd.mpi_built(),
            hvd.mpi_enabled(),
            hvd.ddl_built(),
            hvd.ccl_built(),
            hvd.rocm_built(),
            hvd.sycl_built(),
        ]
    )
    assert type(hvd.nccl_built()) is int
    assert hvd.cuda_built() is (torch.version.cuda is not None)


def test_timeline(ranks: Ranks) -> None:
    ranks(2, without_timeline)
    ranks(2, with_timeline, env={"HOROVOD_TIMELINE": "DYNAMIC"})
    ranks(1, from_the_start, env={"HOROVOD_TIMELINE": "trace.json"})


def without_timeline() -> None:
    with running():
        with pytest.raises(ValueError, match="HOROVOD_TIMELINE=DYNAMIC"):
            hvd.start_timeline("trace.json")
        hvd.stop_timeline()  # there is none
        with pytest.raises(ValueError, match="MPI is not enabled"):
            hvd.mpi_threads_supported()


def with_timeline() -> None:
    with running() as (rank, _):
        name = f"trace{rank}.json"
        for _ in range(2):  # again on the same file
            hvd.start_timeline(name, mark_cycles=True)
        assert Path(name).exists() == (rank == 0)
        hvd.stop_timeline()
        hvd.stop_timeline()
        if rank == 0:
            with pytest.raises(ValueError, match="rank 0 cannot write it"):
                hvd.start_timeline("no/such/folder/trace.json")


def from_the_start() -> None:
    with running():
        assert Path("trace.json").exists()
