"""The group as torch sees it: names, Works, transfers, sub-groups, and the ways to make one."""

import inspect
import math
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from allstep.comm.group.named_group import NamedGroup
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.op.transport import Transport
from support.default_group import joined
from support.ranks import Ranks, held_port, wait_until

# What a ProcessGroup has that is no operation between ranks, and is right as C++ has it.
NOT_OPERATIONS = {
    *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
    *("rank", "size", "boxed", "unbox", "bound_device_id", "use_pg_for_symm_mem_rendezvous"),
    *(
        "_backend_id",
        "_device_types",
        "_get_backend",
        "_register_backend",
        "_set_default_backend",
        "_id",
    ),
    *(
        "_enable_collectives_timing",
        "_has_hooks",
        "_register_on_completion_hook",
        "_wait_for_pending_works",
    ),
    *("_get_sequence_number_for_group", "_set_sequence_number_for_group", "_pybind11_conduit_v1_"),
}


def test_every_operation_of_torch_is_ours() -> None:
    """Fails when a new torch has a collective that the group would not implement: add it, or list
    it above."""
    theirs = {name for name in dir(dist.ProcessGroup) if not name.startswith("__")}
    ours = set(vars(AllstepGroup)) | set(vars(NamedGroup))
    assert theirs - NOT_OPERATIONS - ours == set()


def test_the_seam_names_every_move() -> None:
    moves = {name for name, _ in inspect.getmembers(Transport, inspect.isfunction)}
    source = inspect.getsource(AllstepGroup)
    assert {name for name in moves if f'"{name}"' not in source} == {
        "carry",
        "close",
        "set_timeout",
        "sum_scaled",
    }  # which move nothing, but for the last, which torch does not ask for
    nothing = Transport()
    assert nothing.all_reduce(torch.ones(1), dist.AllreduceOptions()) is None


def test_names_and_inner_backends(ranks: Ranks) -> None:
    def work() -> tuple:
        with joined() as (rank, size):
            group = dist.group.WORLD
            assert type(group) is AllstepGroup
            assert dist.get_backend() == "allstep" == group.name() == group._get_backend_name()
            assert group.rank() == rank and group.size() == size
            assert [str(device) for device in group._device_types] == ["cpu"]
            assert group._get_backend(torch.device("cpu")).name() == "gloo"
            assert dist.distributed_c10d._resolve_process_group(group.group_name) is not None
            group.get_group_store().set(f"key{rank}", "value")
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77))
            group.set_timeout(timedelta(seconds=78))
            named = dist.new_group(group_desc="a description")
            return group.group_name, group.group_desc, named.group_desc

    assert ranks(2, work) == [("0", "default_pg", "a description")] * 2


def test_local_is_asked_first(ranks: Ranks) -> None:
    def work() -> list:
        from allstep.comm.op.work import DONE

        class Local(Transport):
            seen: list = []  # noqa: RUF012

            def all_reduce(self, tensor, opts):
                self.seen.append(("all_reduce", tensor.numel(), opts.asyncOp))
                return DONE if tensor.numel() == 1 else None

            def broadcast(self, tensor, opts):
                self.seen.append(("broadcast", tensor.numel(), opts.rootRank))
                return DONE

        with joined():
            dist.group.WORLD.local = Local()
            one, two = torch.ones(1), torch.ones(2)
            dist.all_reduce(one)
            dist.all_reduce(two, async_op=True).wait()
            dist.broadcast(two, 1)
            dist.group.WORLD.local = None
            return [Local.seen, one.tolist(), two.tolist()]

    seen = [("all_reduce", 1, False), ("all_reduce", 2, True), ("broadcast", 2, 1)]
    assert ranks(2, work) == [[seen, [1.0], [2.0, 2.0]]] * 2


def test_works(ranks: Ranks) -> None:
    """What is asynchronous can be polled, waited for twice, and gives its tensors through a future."""

    def work() -> None:
        with joined() as (_, size):
            for dtype in (torch.float32, torch.int16):  # Gloo's own Work, and ours
                tensor = torch.ones(3, dtype=dtype)
                work = dist.all_reduce(tensor, async_op=True)
                while not work.is_completed():
                    time.sleep(0.001)
                assert tensor.tolist() == [size] * 3, (
                    "a Work that says completed has its result in place"
                )
                assert work.is_success()
                assert work.wait() and work.wait()
                tensor = torch.ones(3, dtype=dtype)
                (found,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
                assert found.data_ptr() == tensor.data_ptr() and tensor.tolist() == [size] * 3
                doubled = (
                    dist.all_reduce(tensor, async_op=True)
                    .get_future()
                    .then(lambda done: done.value()[0] * 2)
                )
                assert doubled.wait().tolist() == [2 * size**2] * 3
            outputs = [torch.zeros(each + 1) for each in range(size)]
            work = dist.all_gather(outputs, torch.ones(dist.get_rank() + 1), async_op=True)
            assert len(work.get_future().wait()) == size
            assert work.result() is not None and work.exception() is None

    ranks(2, work)


def test_transfers_never_block(ranks: Ranks) -> None:
    def work() -> None:
        with joined() as (rank, _):
            peer, large = 1 - rank, 1 << 20
            works = [dist.isend(torch.full((large,), float(rank)), peer, tag=1)]
            works.append(dist.isend(torch.full((large,), float(rank + 10)), peer, tag=2))
            second, first = (
                torch.zeros(large),
                torch.zeros(2, large)[:, ::2],
            )  # the other way round, one not contiguous
            works.append(dist.irecv(second, peer, tag=2))
            works.append(dist.irecv(first, peer, tag=1))
            for each in reversed(works):
                each.wait()
            assert (second == peer + 10).all() and (first == peer).all()
            requests = [
                dist.P2POp(dist.isend, torch.full((3,), float(rank)), peer),
                dist.P2POp(dist.irecv, first[0, :3], peer),
            ]
            for each in dist.batch_isend_irecv(requests):
                each.wait()
            assert first[0, :3].tolist() == [float(peer)] * 3

    ranks(2, work)


def test_transfers_can_be_polled(ranks: Ranks) -> None:
    def work() -> None:
        with joined() as (rank, _):
            place = torch.zeros(3, dtype=torch.bfloat16)
            if rank == 0:
                work = dist.irecv(place, 1)
                assert not work.is_completed()
                dist.barrier()
                wait_until(work.is_completed)
                assert place.tolist() == [7.0] * 3
                assert work.wait() and work.is_success()
                (found,) = dist.irecv(place, 1).get_future().wait()
                assert found.tolist() == [8.0] * 3
            else:
                dist.barrier()
                dist.send(torch.full((3,), 7.0, dtype=torch.bfloat16), 0)
                dist.isend(torch.full((3,), 8.0, dtype=torch.bfloat16), 0).get_future().wait()

    ranks(2, work)


def test_receive_from_anybody(ranks: Ranks) -> None:
    def work() -> list[int]:
        with joined() as (rank, size):
            if rank:
                dist.send(torch.tensor([rank * 10]), 0)
                return []
            place, sources = torch.zeros(1, dtype=torch.int64), []
            for _ in range(size - 1):
                source = dist.recv(place)
                assert place.item() == source * 10
                sources.append(source)
            return sorted(sources)

    assert ranks(4, work)[0] == [1, 2, 3]


def test_receive_from_anybody_in_a_sub_group(ranks: Ranks) -> None:
    def work() -> int | None:
        with joined() as (rank, _):
            group = dist.new_group([1, 2])
            place = torch.zeros(1)
            if rank == 1:
                return dist.recv(place, group=group)
            if rank == 2:
                dist.send(torch.ones(1), 1, group=group)
            return None

    assert ranks(3, work) == [None, 2, None]


def test_objects(ranks: Ranks) -> None:
    def work() -> None:
        with joined() as (rank, size):
            every: list = [None] * size
            dist.all_gather_object(every, {"rank": rank, "text": "x" * rank})
            assert every == [{"rank": each, "text": "x" * each} for each in range(size)]
            found: list = [f"from {rank}", rank]
            dist.broadcast_object_list(found, 1)
            assert found == ["from 1", 1]
            gathered = [None] * size if rank == 2 else None
            dist.gather_object(("rank", rank), gathered, 2)
            assert rank != 2 or gathered == [("rank", each) for each in range(size)]
            own: list = [None]
            dist.scatter_object_list(
                own, [f"for {each}" for each in range(size)] if rank == 0 else None, 0
            )
            assert own == [f"for {rank}"]
            if rank == 0:
                dist.send_object_list(["hello", 1], 1)
            elif rank == 1:
                heard: list = [None, None]
                dist.recv_object_list(heard, 0)
                assert heard == ["hello", 1]

    ranks(3, work)


def test_sub_groups(ranks: Ranks) -> None:
    def work() -> None:
        with joined() as (rank, size):
            if rank < 2:  # only its members make it
                alone = dist.new_group([0, 1], use_local_synchronization=True)
                ones = torch.ones(1, dtype=torch.int16)
                dist.all_reduce(ones, group=alone)
                assert ones.item() == 2
                dist.destroy_process_group(alone)
            total = torch.tensor([float(rank)])
            odd = dist.new_group([1, 3])
            if rank in (1, 3):
                dist.all_reduce(total, group=odd)
                assert total.item() == 4.0
                assert dist.get_backend(odd) == "allstep" and type(odd) is AllstepGroup
            else:
                assert odd == dist.GroupMember.NON_GROUP_MEMBER
            gloo = dist.new_group(backend="gloo")
            beside = torch.ones(1)
            dist.all_reduce(beside, group=gloo)
            assert beside.item() == size
            pair, pairs = dist.new_subgroups(group_size=2)
            assert len(pairs) == 2
            sums = torch.tensor([rank])
            dist.all_reduce(sums, group=pair)
            assert sums.item() == [1, 1, 5, 5][rank]
            dist.destroy_process_group(gloo)
            ones = torch.ones(1)
            dist.all_reduce(ones)
            assert ones.item() == size

    ranks(4, work)


def test_other_argument_shapes(ranks: Ranks) -> None:
    """A ProcessGroup may be called directly, with single tensors in place of lists and options."""

    def work() -> None:
        with joined() as (rank, size):
            group, second = dist.group.WORLD, timedelta(seconds=20)
            tensor = torch.ones(2)
            group.allreduce(tensor).wait()
            group.allreduce([tensor], dist.ReduceOp.MAX).wait()
            group.allreduce(tensor, op=dist.ReduceOp.SUM, timeout=second).wait()
            assert tensor.tolist() == [size**2] * 2
            tensor = torch.full((2,), float(rank))
            group.broadcast(tensor, 1).wait()
            group.broadcast(tensor, root=1, timeout=second).wait()
            assert tensor.tolist() == [1.0, 1.0]
            group.reduce(tensor, root=0, op=dist.ReduceOp.PRODUCT).wait()
            group.reduce(tensor, 0).wait()
            places = [torch.zeros(1) for _ in range(size)]
            group.allgather(places, torch.full((1,), float(rank))).wait()
            group.allgather(places, torch.full((1,), float(rank)), timeout=second).wait()
            assert torch.cat(places).tolist() == list(range(size))
            group.gather(places if rank == 0 else [], torch.full((1,), 5.0), root=0).wait()
            group.scatter(tensor[:1], [torch.full((1,), 6.0)] * size if rank == 0 else [], 0).wait()
            group.reduce_scatter(tensor[1:], [torch.ones(1)] * size, op=dist.ReduceOp.MAX).wait()
            assert tensor.tolist() == [6.0, 1.0]
            group.alltoall(places, [torch.ones(1)] * size, timeout=second).wait()
            group.alltoall_base(torch.zeros(size), torch.ones(size), [], [], timeout=second).wait()
            group.barrier().wait()
            group.barrier(timeout=second).wait()
            group.monitored_barrier(second)

    ranks(2, work)


def test_made_and_destroyed_again_and_again(ranks: Ranks) -> None:
    def work() -> list[float]:
        from allstep.comm.join.rendezvous import find_store
        from allstep.limits import read_limits
        from allstep.world import World

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        world = World.detect()
        meeting = find_store(world, read_limits())
        sums = []
        for number in range(4):
            store = dist.PrefixStore(str(number), meeting.store)
            dist.init_process_group("allstep", store=store, rank=world.rank, world_size=world.size)
            total = torch.tensor([float(number)])
            dist.all_reduce(total)
            sums.append(total.item())
            dist.barrier()
            dist.destroy_process_group()
        return sums

    assert ranks(2, work) == [[0.0, 2.0, 4.0, 6.0]] * 2


SCRIPT = """
import torch, torch.distributed as dist
import allstep.comm
dist.init_process_group("allstep")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
assert dist.get_backend() == "allstep" and total.item() == 3.0
dist.barrier()
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.usefixtures("processes")
def test_a_plain_script_with_torchruns_variables() -> None:
    common = {name: value for name, value in os.environ.items() if not name.startswith("ALLSTEP_")}
    common |= {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with held_port() as port:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT],
                env={
                    **common,
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all("fine" in output for output in outputs)


@pytest.mark.parametrize("env", [{}, {"ONLY_GLOO": "1"}], ids=["shared memory", "gloo"])
def test_a_lost_peer_is_an_error_not_a_crash(ranks: Ranks, env: dict[str, str]) -> None:
    def work() -> None:
        with joined() as (rank, _):
            dist.barrier()
            if rank == 1:
                os._exit(3)
            tensor = torch.ones(1000, dtype=torch.int16)
            work = dist.all_reduce(tensor, async_op=True)
            future = work.get_future()
            for wait in (work.wait, future.wait):
                try:
                    wait()
                except RuntimeError as error:
                    print("raised", type(error).__name__)
            assert work.exception() is not None and work.is_completed() and not work.is_success()
            os._exit(4)

    outcomes = ranks.outcomes(2, work, env=env)
    assert [outcome.exit_code for outcome in outcomes] == [4, 3], outcomes
    assert outcomes[0].output.count("raised") == 2


def test_cuda_tensors_need_nccl(ranks: Ranks) -> None:
    """What can be seen without a GPU:

    CUDA calls go to `nccl`, whatever that is, under the names a Backend has.
    """

    def work() -> list[str]:
        from allstep.comm.op.work import DONE

        class Recorder:
            names: list[str] = []  # noqa: RUF012

            def __getattr__(self, name: str):
                self.names.append(name)
                return lambda *_: DONE

        class OnCuda:
            is_cuda = True

        with joined():
            group, tensor, opts = dist.group.WORLD, OnCuda(), dist.ReduceScatterOptions()
            with pytest.raises(RuntimeError, match="no NCCL"):
                group.allreduce([tensor], dist.AllreduceOptions())
            group.nccl = Recorder()
            group.allreduce([tensor], dist.AllreduceOptions())
            group.broadcast([tensor], dist.BroadcastOptions())
            group.all_gather_single(tensor, tensor)
            group.reduce_scatter_single(tensor, tensor, opts)
            group.all_to_all_single(tensor, tensor, [], [])
            group.send([tensor], 0, 0)
            group.nccl = None
            return Recorder.names

    backend = torch._C._distributed_c10d.ProcessGroupGloo  # its methods are those of every Backend
    (names,) = ranks(1, work)
    assert all(hasattr(backend, name) for name in names)
    assert names == [
        "allreduce",
        "broadcast",
        "_allgather_base",
        "_reduce_scatter_base",
        "alltoall_base",
        "send",
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_methods_own_cost(ranks: Ranks, num_ranks: int) -> None:
    """`dist.all_reduce` with a transport that does nothing: ours next to torch's own.

    Generous: times on a shared machine say little.
    """

    def work() -> float:
        from allstep.comm.op.work import DONE

        class Nothing(Transport):
            def all_reduce(self, tensor, opts):
                return DONE

        with joined():
            group, tensor, opts = dist.group.WORLD, torch.ones(1024), dist.AllreduceOptions()
            group.local = Nothing()
            best = math.inf
            end = time.monotonic() + 20  # the machine may be slow for a while, not all the time
            while best > 10e-6 and time.monotonic() < end:
                best = min(best, timed(lambda: group.allreduce([tensor], opts)))
            group.local = None
            return best

    def timed(call) -> float:
        began = time.perf_counter()
        for _ in range(500):
            call()
        return (time.perf_counter() - began) / 500

    assert min(ranks(num_ranks, work)) < 10e-6
