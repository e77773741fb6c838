"""Unmodified frameworks on backend "allstep": each computes what the same code computes on Gloo, or
in one process."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.default_group import joined
from support.ranks import Ranks

# The first use of DTensor and of torch.compile imports a second or two of torch in every rank.


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def batch(seed: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def steps(model: nn.Module, rank: int, count: int = 3) -> list[Tensor]:
    """Train a little; the weights after it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number in range(count):
        optimizer.zero_grad()
        model(batch(10 * number + rank)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(size: int) -> list[Tensor]:
    """What one process computes on the batches of all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number in range(3):
        optimizer.zero_grad()
        model(
            torch.cat([batch(10 * number + rank) for rank in range(size)])
        ).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "env", [{}, {"ONLY_GLOO": "1"}, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}], ids=str
)
def test_ddp(ranks: Ranks, env: dict[str, str]) -> None:
    def work() -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
            allreduce_hook,
            fp16_compress_hook,
        )
        from torch.nn.parallel import DistributedDataParallel

        dist.set_debug_level_from_env()
        with joined() as (rank, size):
            close(steps(DistributedDataParallel(net(), bucket_cap_mb=0.0001), rank), alone(size))
            close(
                steps(DistributedDataParallel(net(), gradient_as_bucket_view=True), rank),
                alone(size),
            )
            close(steps(DistributedDataParallel(net(), static_graph=True), rank), alone(size))
            hooked = DistributedDataParallel(net())
            hooked.register_comm_hook(None, allreduce_hook)
            close(steps(hooked, rank), alone(size))
            rough = DistributedDataParallel(net())
            rough.register_comm_hook(None, fp16_compress_hook)
            assert all(weight.isfinite().all() for weight in steps(rough, rank))

    ranks(2, work, env=env, timeout=150)


def test_ddp_with_unused_parameters(ranks: Ranks) -> None:
    def work() -> list[bool]:
        from torch.nn.parallel import DistributedDataParallel

        class Sometimes(nn.Module):
            def __init__(self):
                super().__init__()
                self.always, self.rank0, self.never = (
                    nn.Linear(6, 4),
                    nn.Linear(6, 4),
                    nn.Linear(6, 4),
                )

            def forward(self, x):
                found = self.always(x)
                return found + self.rank0(x) if dist.get_rank() == 0 else found

        with joined() as (rank, _):
            model = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
            for number in range(2):
                model(batch(number + rank)).sum().backward()
            grads = [
                layer.weight.grad
                for layer in (model.module.always, model.module.rank0, model.module.never)
            ]
            return [grad is not None and bool(grad.any()) for grad in grads]

    assert ranks(2, work) == [[True, True, False]] * 2


def test_ddp_join_with_uneven_inputs(ranks: Ranks) -> None:
    def work() -> list[float]:
        from torch.nn.parallel import DistributedDataParallel

        with joined() as (rank, _):
            model = DistributedDataParallel(net())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with model.join():
                for number in range(2 + rank):
                    optimizer.zero_grad()
                    model(batch(number + rank)).square().mean().backward()
                    optimizer.step()
            return model.module[0].weight.flatten().tolist()

    first, second = ranks(2, work)
    assert first == second


def test_ddp_with_sparse_gradients(ranks: Ranks) -> None:
    """Several times: a group that went with its model once waited for its own Gloo thread for ever."""

    def work() -> None:
        from torch.nn.parallel import DistributedDataParallel

        with joined() as (rank, _):
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.EmbeddingBag(5, 3, sparse=True, mode="sum"))
            model(torch.tensor([[rank, 4]])).sum().backward()
            grad = model.module.weight.grad
            assert grad.is_sparse
            assert grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0, 1.0]

    for _ in range(4):
        ranks(2, work, timeout=150)


def test_zero_redundancy_optimizer(ranks: Ranks) -> None:
    def work() -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        with joined() as (rank, size):
            model = DistributedDataParallel(net())
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
            )
            for number in range(3):
                optimizer.zero_grad()
                model(batch(10 * number + rank)).square().mean().backward()
                optimizer.step()
            close([parameter.detach() for parameter in model.parameters()], alone(size))
            optimizer.consolidate_state_dict(0)

    ranks(2, work)


def test_fsdp2(ranks: Ranks) -> None:
    def work() -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        with joined() as (rank, size):
            model = net()
            for layer in (model[0], model[2]):
                fully_shard(layer)
            fully_shard(model)
            steps(model, rank)
            close(
                [parameter.full_tensor().detach() for parameter in model.parameters()], alone(size)
            )
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert norm.full_tensor().isfinite()
            halves = net()
            fully_shard(halves, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
            steps(halves, rank)
            scaled = net()
            fully_shard(scaled)
            scaled.set_gradient_divide_factor(2.0 * size)
            scaled(batch(rank)).square().mean().backward()
            assert all(
                parameter.grad.full_tensor().isfinite().all() for parameter in scaled.parameters()
            )

    ranks(2, work, timeout=150)


def test_hsdp_and_device_meshes(ranks: Ranks) -> None:
    def work() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        with joined() as (rank, size):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
            model = net()
            fully_shard(model, mesh=mesh)
            steps(model, rank)
            close(
                [parameter.full_tensor().detach() for parameter in model.parameters()], alone(size)
            )

    ranks(4, work, timeout=150)


def test_dtensor_and_tensor_parallelism(ranks: Ranks) -> None:
    def work() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        with joined() as (_, size):
            mesh = init_device_mesh("cpu", (size,))
            whole = torch.arange(24.0).view(6, 4)
            rows = distribute_tensor(whole, mesh, [Shard(0)])
            assert torch.equal(rows.full_tensor(), whole)
            columns = rows.redistribute(mesh, [Shard(1)])
            assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
            assert torch.equal(
                (rows @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])).full_tensor(),
                whole @ whole.T,
            )
            assert rows.sum().full_tensor() == whole.sum()
            uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
            assert torch.equal(uneven.full_tensor(), torch.arange(5.0))
            model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
            for parameter in model.parameters():
                dist.broadcast(parameter, 0)
            expected = copy.deepcopy(model)(batch(1))
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            found = model(batch(1))
            torch.testing.assert_close(found, expected)
            found.sum().backward()

    ranks(2, work, timeout=150)


def test_distributed_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    def work(folder: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.fsdp import fully_shard

        with joined() as (rank, _):
            model, other = net(), net()
            fully_shard(model)
            fully_shard(other)
            steps(model, rank)
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
            state = {"model": other.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            other.load_state_dict(state["model"])
            close(
                [p.full_tensor() for p in other.parameters()],
                [p.full_tensor() for p in model.parameters()],
            )

    ranks(2, work, str(tmp_path / "checkpoint"), timeout=150)


def functional(x: Tensor) -> list[Tensor]:
    import torch.distributed._functional_collectives as funcol

    group = list(range(dist.get_world_size()))
    rank = dist.get_rank()
    return [
        funcol.all_reduce(x * 2, "sum", group),
        funcol.all_reduce(x * 2, "avg", group),
        funcol.all_gather_tensor(x + rank, 0, group),
        funcol.reduce_scatter_tensor(torch.cat([x, x + rank]), "sum", 0, group),
        funcol.all_to_all_single(torch.cat([x, x + rank]), None, None, group),
        funcol.broadcast(x + rank, 1, group),
    ]


def gathered_past_python(name: str) -> list[float]:
    """The one functional collective that C++ takes to the Backend inside the group without asking
    Python."""
    import torch as t  # cloudpickle stumbles over `torch.ops` as a global

    output, ops = t.zeros(8), t.ops._c10d_functional
    ops.wait_tensor(ops.all_gather_into_tensor_out(t.arange(4.0), 2, name, out=output))
    found: list[float] = output.tolist()
    return found


def test_functional_collectives(ranks: Ranks) -> None:
    def work(backend: str, compiled: bool) -> list[Tensor]:
        with joined(backend) as (rank, _):
            call = (
                torch.compile(functional, backend="aot_eager", fullgraph=True)
                if compiled
                else functional
            )
            found = [tensor.clone() for tensor in call(torch.arange(4.0) + rank)]
            if backend == "allstep":
                assert gathered_past_python(dist.group.WORLD.group_name) == [0, 1, 2, 3] * 2
            return found

    expected = ranks(2, work, "gloo", False)
    for compiled in (False, True):
        for mine, theirs in zip(
            ranks(2, work, "allstep", compiled, timeout=150), expected, strict=True
        ):
            for one, other in zip(mine, theirs, strict=True):
                assert torch.equal(one, other)


def test_in_place_collectives_under_compile(ranks: Ranks) -> None:
    def work() -> list[float]:
        def step(x: Tensor) -> Tensor:
            y = x * 2
            dist.all_reduce(y)
            return y + 1

        with joined() as (rank, _):
            found: list[float] = torch.compile(step, backend="aot_eager")(
                torch.full((2,), float(rank))
            ).tolist()
            return found

    assert ranks(2, work, timeout=150) == [[3.0, 3.0]] * 2


def test_an_error_in_ddps_backward_is_an_error(ranks: Ranks) -> None:
    """Not a crash: what the peer's end does to an unmodified DDP."""

    def work() -> None:
        import os

        from torch.nn.parallel import DistributedDataParallel

        with joined() as (rank, _):
            model = DistributedDataParallel(net())
            dist.barrier()
            if rank == 1:
                os._exit(3)
            with pytest.raises(RuntimeError):
                model(batch(1)).sum().backward()
            os._exit(4)

    for env in ({}, {"ONLY_GLOO": "1"}):
        outcomes = ranks.outcomes(2, work, env=env)
        assert [outcome.exit_code for outcome in outcomes] == [4, 3], outcomes[0].output
