"""`DistributedOptimizer`: N workers against one, step by step, and everything that scripts do to
gradients in between.

The yardstick is one process with plain torch and the whole batch, in float64: losses and weights
must agree to 1e-10.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from allstep.torch.compression import Compression
from allstep.torch.mpi_ops import Average
from allstep.torch.optimizer_rules import by_owners
from support.ranks import Ranks

BATCH, FEATURES, STEPS = 12, 6, 8


class LayerWise(torch.optim.Optimizer):
    """A user's optimizer that looks at whole layers: each step has the length lr * |weights|."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["seen"] = state.get("seen", 0) + 1  # a plain number
                    state["mean"] = (
                        0.5 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                    )  # a new tensor each time
                    ratio = parameter.norm() / (state["mean"].norm() + 1e-12)
                    parameter.add_(state["mean"] * ratio, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, 0.02, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(
        params, 0.05, initial_accumulator_value=0.1
    ),  # has state before its first step
    "layer-wise": lambda params: LayerWise(params, 0.01),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.Flatten(),
        nn.Linear(8, 40),
        nn.Tanh(),
        nn.Linear(40, 1),
    )
    net[1].to(memory_format=torch.channels_last)
    return net.double()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        count = BATCH - number % 3  # not all of them divide
        data = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
        yield data, data.sum(1, keepdim=True).sin()


def loss_of(net: nn.Module, data: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(net(data), target)


def alone(name: str, clip: bool = False) -> tuple[list[float], list[Tensor]]:
    """One process, the whole batch."""
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    losses = []
    for data, target in batches():
        optimizer.zero_grad()
        loss = loss_of(net, data, target)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in net.parameters()]


def together(name: str, clip: bool, passes: int, share_weights: bool) -> None:
    """Each rank its share of the same batches, weighted by samples; against `alone`."""
    import allstep.torch as hvd

    hvd.init()
    net = model()
    if hvd.rank():
        for parameter in net.parameters():
            parameter.data.add_(1.0)  # broadcast_parameters must mend this
    if not share_weights:
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[name](net.parameters()),
        net.named_parameters(),
        backward_passes_per_step=passes,
        share_weights=share_weights,
    )
    if share_weights:
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    expected, weights = alone(name, clip)
    for (data, target), whole in zip(batches(), expected, strict=True):
        mine = torch.arange(hvd.rank(), len(data), hvd.size())
        optimizer.zero_grad()
        optimizer.weight = len(mine)
        total = 0.0
        for part in mine.tensor_split(passes):
            loss = (
                loss_of(net, data[part], target[part])
                if len(part)
                else 0.0 * sum(p.sum() for p in net.parameters())
            )
            (loss * (len(part) / max(1, len(mine)))).backward()
            total += loss.item() * len(part)
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        mean = hvd.allreduce(torch.tensor(total, dtype=torch.float64), op=hvd.Sum).item() / len(
            data
        )
        assert mean == pytest.approx(whole, abs=1e-10)
    for parameter, weight in zip(net.parameters(), weights, strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=0, atol=1e-10)
    hvd.shutdown()


@pytest.mark.parametrize("share_weights", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_as_one_worker(ranks: Ranks, num_ranks: int, name: str, share_weights: bool) -> None:
    def work() -> None:
        for clip, passes in ((False, 1), (True, 1), (False, 2)):
            together(name, clip, passes, share_weights)

    ranks(num_ranks, work, timeout=150)


@pytest.mark.parametrize("share_weights", [False, True])
def test_as_one_worker_over_hosts(ranks: Ranks, share_weights: bool) -> None:
    def work() -> None:
        from allstep.parallel.exchange import buckets

        buckets.BUCKET = 500  # several buckets
        together("momentum", False, 1, share_weights)
        together("layer-wise", False, 1, share_weights)

    ranks(3, work, hosts=["a", "a", "b"], timeout=150)


# What scripts do


def started(share_weights: bool = False, **options: Any) -> tuple[Any, nn.Module, Any]:
    import allstep.torch as hvd

    hvd.init()
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.1),
        net.named_parameters(),
        share_weights=share_weights,
        **options,
    )
    return hvd, net, optimizer


def test_the_class(ranks: Ranks) -> None:
    def work() -> None:
        hvd, net, optimizer = started()
        assert isinstance(optimizer, torch.optim.SGD)
        assert type(optimizer).__name__ == "SGD"
        assert type(optimizer).__module__ == "horovod.torch.optimizer"
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loss_of(net, *next(batches())).backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert optimizer._parameter_names[next(net.parameters())] == "1.weight"
        hvd.shutdown()

    ranks(2, work)


def test_unused_frozen_and_late_parameters(ranks: Ranks) -> None:
    """Used by nobody:

    None, so weight decay leaves it alone. Used by one: that one's share. Unfrozen later: takes
    part.
    """

    def work() -> None:
        import allstep.torch as hvd

        hvd.init()
        a, b, c, d = (nn.Parameter(torch.ones(3)) for _ in range(4))
        d.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([a, b, c, d], 1.0, weight_decay=0.5),
            [("a", a), ("b", b), ("c", c), ("d", d)],
        )
        loss = (a * (hvd.rank() + 1.0)).sum() + (b.sum() if hvd.rank() == 1 else 0.0)
        loss.backward()
        optimizer.step()
        assert a.tolist() == [1 - 2.0 - 0.5] * 3  # the mean of 1, 2, 3
        torch.testing.assert_close(b.detach(), torch.full((3,), 1 - 1 / 3 - 0.5))
        assert c.grad is None
        assert c.tolist() == [1.0] * 3
        optimizer.zero_grad()
        d.requires_grad_(True)
        (d * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        assert d.tolist() == [1 - 2.0 - 0.5] * 3
        a_after = a.tolist()
        net_zero = [p for p in (a, b, c) if p.grad is not None]
        assert not net_zero
        assert a.tolist() == a_after
        hvd.shutdown()

    ranks(3, work)


def test_replaced_gradients_and_data(ranks: Ranks) -> None:
    def work() -> None:
        for share_weights in (False, True):
            hvd, net, optimizer = started(share_weights)
            data, target = next(batches())
            mine = slice(hvd.rank(), None, hvd.size())
            reference = model()
            plain = torch.optim.SGD(reference.parameters(), 0.1)
            for turn in range(3):
                if turn == 1:
                    for parameter in net.parameters():
                        parameter.data = parameter.data.clone()
                net.zero_grad()
                plain.zero_grad()
                loss_of(net, data[mine], target[mine]).backward()
                loss_of(reference, data, target).backward()
                if turn == 2:
                    for parameter in net.parameters():
                        parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
                optimizer.step()
                plain.step()
                for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
            hvd.shutdown()

    ranks(2, work)


def test_parameters_that_are_no_longer_the_models(ranks: Ranks) -> None:
    """torch's own optimizers then change nothing and say nothing; ours say it once."""

    def work() -> None:
        for share_weights in (False, True):
            hvd, net, optimizer = started(share_weights)
            net.load_state_dict(
                {name: value.clone() for name, value in net.state_dict().items()}, assign=True
            )
            loss_of(net, *next(batches())).backward()
            with pytest.warns(
                UserWarning, match=r"none of this optimizer's 6 parameters has a gradient"
            ):
                optimizer.step()
            optimizer.step()
            hvd.shutdown()

    ranks(2, work)


def test_guards(ranks: Ranks) -> None:
    def work() -> None:
        hvd, net, optimizer = started()
        data, target = next(batches())
        loss_of(net, data, target).backward()
        with pytest.raises(
            AssertionError, match=r"zero_grad\(\) was called after loss.backward\(\)"
        ):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            loss_of(net, data, target).backward()
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert any(
            "called without optimizer.skip_synchronize()" in str(each.message) for each in caught
        )
        optimizer.zero_grad()
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(AssertionError, match="create_graph"),
        ):
            loss_of(net, data, target).backward(create_graph=True)
        hvd.shutdown()

    ranks(2, work)


def test_wrong_arguments(ranks: Ranks) -> None:
    def work() -> None:
        import allstep.torch as hvd

        net = model()
        with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1))
        hvd.init()
        names = list(net.named_parameters())

        def make(named: Any = names, **options: Any) -> None:
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), named, **options)

        once = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), names)
        with pytest.raises(ValueError, match=r"SGD is a distributed optimizer already: .* once"):
            hvd.DistributedOptimizer(once, names)
        with pytest.raises(ValueError, match="sequence of tuples"):
            make(list(net.parameters()))
        with pytest.raises(ValueError, match=r"duplicate names: 1\.weight"):
            make([*names, names[0]])
        with pytest.raises(ValueError, match="1 of the optimizer's are not among them"):
            make(names[1:])
        with pytest.raises(ValueError, match="backward_passes_per_step=0"):
            make(backward_passes_per_step=0)
        with pytest.raises(ValueError, match="gradient_predivide_factor"):
            make(gradient_predivide_factor=2.0, op=hvd.Sum)
        with pytest.raises(ValueError, match="groups="):
            make(groups=0)
        with pytest.raises(ValueError, match="twice"):
            make(groups=[[names[0][1]], [names[0][1]]])
        with pytest.raises(ValueError, match="not of str"):
            make(groups=[["weight"]])
        with pytest.warns(DeprecationWarning, match="num_groups"):
            make(num_groups=2)
        with pytest.raises(ValueError, match="share_weights works with"):
            make(share_weights=True, compression=hvd.Compression.fp16)
        hvd.shutdown()

    ranks(2, work)


def test_options_that_change_the_arithmetic(ranks: Ranks) -> None:
    def gradient(hvd: Any, **options: Any) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), **options)
        (weight * (hvd.rank() + 1.0)).sum().backward()
        optimizer.synchronize()
        return weight.grad.tolist()

    def work() -> None:
        import allstep.torch as hvd

        hvd.init()
        assert gradient(hvd) == [1.5] * 4
        assert gradient(hvd, op=hvd.Sum) == [3.0] * 4
        assert gradient(hvd, gradient_predivide_factor=4.0) == [1.5] * 4
        assert gradient(hvd, compression=hvd.Compression.fp16) == [1.5] * 4
        assert gradient(hvd, compression=hvd.Compression.bf16) == [1.5] * 4
        assert gradient(hvd, groups=1) == [1.5] * 4
        hvd.shutdown()

    ranks(2, work)


def test_process_set(ranks: Ranks) -> None:
    def work() -> list[float]:
        import allstep.torch as hvd

        pair = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[pair])
        weight = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), process_set=pair)
        (weight * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        found = weight.tolist()
        # a shutdown anywhere ends the engine everywhere, and rank 1 has nothing to wait for
        hvd.barrier()
        hvd.shutdown()
        return found

    assert ranks(3, work) == [[-2.0] * 2, [-2.0] * 2, [-2.0] * 2]


@pytest.mark.parametrize(
    "options", [{}, {"sparse_as_dense": True}, {"share_weights": True}], ids=str
)
def test_sparse_embeddings(ranks: Ranks, options: dict[str, bool]) -> None:
    def work() -> None:
        import allstep.torch as hvd

        hvd.init()
        table = nn.Embedding(10, 3, sparse=True)
        table.weight.data.zero_()
        dense = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, dense], 1.0), **options)
        for _ in range(2):
            optimizer.zero_grad()
            rows = torch.tensor([hvd.rank(), 5])
            (table(rows).sum() + dense.sum()).backward()
            optimizer.step()
        expected = torch.zeros(10, 3)
        expected[[0, 1, 2]] = -2 / 3
        expected[5] = -2.0
        torch.testing.assert_close(table.weight.detach(), expected)
        assert dense.tolist() == [-2.0, -2.0]
        hvd.shutdown()

    ranks(3, work)


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]], ids=["one host", "two hosts"])
def test_sparse_as_dense_gives_sparse_gradients_back(ranks: Ranks, hosts: list[str]) -> None:
    """Also where this rank had none.

    SparseAdam, which refuses dense gradients, does as it does with gradients that travel sparse.
    """

    def train(**options: bool) -> Tensor:
        import allstep.torch as hvd

        table = nn.Embedding(10, 3, sparse=True)
        table.weight.data.fill_(1.0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam([table.weight], 0.1), **options)
        for step in range(3):
            optimizer.zero_grad()
            if step != 1 or hvd.rank() == 0:
                table(torch.tensor([hvd.rank(), 5])).pow(2).sum().backward()
            optimizer.synchronize()
            assert table.weight.grad is not None and table.weight.grad.is_sparse
            with optimizer.skip_synchronize():
                optimizer.step()
        return table.weight.detach()

    def work() -> None:
        import allstep.torch as hvd

        hvd.init()
        torch.testing.assert_close(train(sparse_as_dense=True), train())
        hvd.shutdown()

    ranks(2, work, hosts=hosts)


def test_two_optimizers_and_closures(ranks: Ranks) -> None:
    def work() -> None:
        import allstep.torch as hvd

        hvd.init()
        a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        first, second = (hvd.DistributedOptimizer(torch.optim.SGD([p], 1.0)) for p in (a, b))
        for _ in range(2):
            for optimizer, parameter in ((second, b), (first, a)):
                optimizer.zero_grad()
                (parameter * (hvd.rank() + 1.0)).sum().backward()
                optimizer.step()
        assert a.tolist() == b.tolist() == [-3.0] * 2

        def closure(optimizer: Any, parameter: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = ((parameter - hvd.rank()) ** 2).sum()
            loss.backward()
            return loss

        first.step(lambda: closure(first, a))
        assert a.tolist() == [-3.0 + 2 * 3.5] * 2
        c = nn.Parameter(torch.zeros(2))
        search = hvd.DistributedOptimizer(torch.optim.LBFGS([c], line_search_fn="strong_wolfe"))
        search.step(lambda: closure(search, c))
        torch.testing.assert_close(
            c.detach(), torch.full((2,), 0.5)
        )  # the minimum of the mean of both losses
        hvd.shutdown()

    ranks(2, work)


def test_added_parameters(ranks: Ranks) -> None:
    def work() -> None:
        import allstep.torch as hvd

        hvd.init()
        a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a], 1.0), [("a", a)])
        for parameters in ([a], [a, b]):
            if len(parameters) == 2:
                optimizer.add_param_group({"params": [b], "lr": 0.5})
            optimizer.zero_grad()
            sum(p.sum() * (hvd.rank() + 1.0) for p in parameters).backward()
            optimizer.step()
        assert a.tolist() == [-3.0] * 2
        assert b.tolist() == [-0.75] * 2
        hvd.shutdown()

    ranks(2, work)


def test_uneven_data_with_join(ranks: Ranks) -> None:
    """Ranks with fewer batches join; the others go on with their help, as Horovod has it: divided
    by all ranks."""

    def work() -> tuple[list[float], int]:
        import allstep.torch as hvd

        hvd.init()
        a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(300_000))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], 1.0), [("a", a), ("b", b)])
        for _ in range(2 * hvd.rank() + 1):
            optimizer.zero_grad()
            (a.sum() + b.sum()).backward()
            optimizer.step()
        last = hvd.join()
        found = a.tolist()
        assert torch.allclose(b, a[0])
        after = hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)
        assert after.item() == hvd.size()
        hvd.shutdown()
        return found, last

    found = ranks(3, work, timeout=150)
    assert [last for _, last in found] == [2, 2, 2]
    assert found[0][0] == [-1.0] * 3
    assert found[2][0] == pytest.approx([-1 - 2 * 2 / 3 - 2 * 1 / 3] * 3)


# Shared weights


def test_join_with_shared_weights_is_refused_at_once(ranks: Ranks) -> None:
    def work() -> tuple[str, float]:
        import allstep.torch as hvd

        hvd.init()
        a = nn.Parameter(torch.zeros(300))
        inner = torch.optim.SGD([a], 1.0)
        optimizer = hvd.DistributedOptimizer(inner, [("a", a)], share_weights=True)
        began = time.monotonic()
        try:
            for _ in range(hvd.rank() + 1):
                a.sum().backward()
                optimizer.step()
            hvd.join()
        except hvd.HorovodInternalError as error:
            return str(error), time.monotonic() - began
        finally:
            hvd.shutdown()
        return "", 0.0

    for text, seconds in ranks(2, work):
        assert "hvd.join()" in text and "share_weights=True is not supported" in text
        # Without the refusal the ranks wait for the start timeout of 30 s.
        assert seconds < 20


def test_state_moves_between_numbers_of_ranks(ranks: Ranks, tmp_path: Any) -> None:
    """Saved by rank 0 alone of three sharing ranks, loaded by two, by one and by plain torch: all
    go on alike."""

    def train(name: str, share_weights: bool, before: str | None, after: str | None) -> list[float]:
        import allstep.torch as hvd

        hvd.init()
        net = model()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[name](net.parameters()), net.named_parameters(), share_weights=share_weights
        )
        if before:
            saved = torch.load(before)
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
        data, target = next(batches())
        mine = slice(hvd.rank(), None, hvd.size())
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.weight = len(data[mine])
            loss_of(net, data[mine], target[mine]).backward()
            optimizer.step()
        if after and hvd.rank() == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, after)
        hvd.barrier()
        found = torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).tolist()
        hvd.shutdown()
        return found

    for name in ("adam", "layer-wise"):
        file = str(tmp_path / f"{name}.pt")
        ranks(3, train, name, True, None, file)
        results = [
            ranks(count, train, name, share, file, None)[0]
            for count, share in ((2, True), (3, True), (2, False), (1, False))
        ]
        for other in results[1:]:
            assert other == pytest.approx(results[0], abs=1e-12)


@pytest.mark.parametrize("share_weights", [False, True])
def test_a_state_that_only_rank_0_has_reaches_all(ranks: Ranks, share_weights: bool) -> None:
    """The usual way of Horovod scripts: rank 0 loads a checkpoint, everybody gets it."""

    def work(places: str) -> None:
        import allstep.torch as hvd

        hvd.init()
        net = model()
        plain = torch.optim.Adam(net.parameters(), 0.01)
        loss_of(net, *next(batches())).backward()
        plain.step()
        saved = plain.state_dict()
        fresh = torch.optim.Adam(net.parameters(), 0.5)
        if hvd.rank() == 0:
            fresh.load_state_dict(saved)  # the only one
        optimizer = hvd.DistributedOptimizer(
            fresh, net.named_parameters(), share_weights=share_weights and len(set(places)) == 1
        )
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.01
        found = optimizer.state_dict()["state"]
        assert found.keys() == saved["state"].keys()
        for number, values in saved["state"].items():
            for key, value in values.items():
                torch.testing.assert_close(found[number][key], value)
        hvd.shutdown()

    ranks(3, work, "aaa")
    ranks(3, work, "aab", hosts=list("aab"))


def test_shared_weights_are_one_copy(ranks: Ranks) -> None:
    def work() -> None:
        hvd, net, optimizer = started(share_weights=True)
        data, target = next(batches())
        kept = loss_of(net, data, target)
        loss_of(net, data, target).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()  # a graph from before the step, as without sharing
        addresses = hvd.allgather_object([p.untyped_storage().nbytes() for p in net.parameters()])
        assert addresses[0] == [p.numel() * 8 for p in net.parameters()]
        hvd.barrier()
        if hvd.rank() == 1:
            next(net.parameters()).data.fill_(7.0)
        hvd.barrier()
        assert (next(net.parameters()) == 7.0).all()
        hvd.shutdown()

    ranks(2, work)


def test_shared_weights_are_refused_in_an_elastic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joining worker would wait for the others in the constructor of the optimizer."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ValueError, match="does not work in an elastic run"):
        by_owners(torch.optim.SGD([torch.zeros(1)], 0.1), Average, Compression.none)
