"""Pushes of some rows: what they change, what they leave alone, and all workers together.

The reference is torch's own optimizer on the dense gradient, after which the rows without gradient
get back the values and the state that they had: that is what lazy state means.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import allstep.kvstore
from allstep.errors import UserError
from support.ranks import Ranks

SHAPE = (900, 700)
"""Three slices of whole rows."""
LONG_ROWS = (3, 600_000)
"""Each row is cut into three slices."""


class Lazy:
    """The reference; `state`: of the whole table."""

    def __init__(self, value: Tensor, cls: Any, **settings: Any) -> None:
        self.value = nn.Parameter(value.clone())
        self.optimizer = cls([self.value], **settings)

    def push(self, gradient: Tensor) -> None:
        untouched = torch.ones(len(self.value), dtype=torch.bool)
        untouched[gradient._indices()[0]] = False
        before = {name: table.clone() for name, table in self.tables().items()}
        self.value.grad = gradient.to_dense()
        self.optimizer.step()
        after = self.tables()
        for name, table in before.items():
            after[name][untouched] = table[untouched]

    def tables(self) -> dict[str, Tensor]:
        """Return the value, and what the optimizer keeps for each element."""
        state = self.optimizer.state[self.value]
        return {"": self.value.detach()} | {
            name: table
            for name, table in state.items()
            if isinstance(table, Tensor) and table.shape == self.value.shape
        }


def rows_of(shape: tuple[int, ...], rows: list[int], seed: int) -> Tensor:
    """Return a gradient of these rows, which may repeat."""
    values = torch.randn(len(rows), *shape[1:], generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, shape, check_invariants=False
    )


def pulled(kv: Any, key: str, shape: tuple[int, ...]) -> Tensor:
    out = torch.empty(shape)
    kv.pull(key, out=out)
    return out


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.25}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
}


CASES = [
    *[("local", optimizer, SHAPE) for optimizer in OPTIMIZERS],
    *[("dist_sync", optimizer, SHAPE) for optimizer in ("momentum", "adam")],
    *[("dist_async", optimizer, SHAPE) for optimizer in ("momentum", "adagrad")],
    ("dist_stale:2", "momentum", SHAPE),
    *[("dist_async", optimizer, LONG_ROWS) for optimizer in ("momentum", "adam")],
]


@pytest.mark.parametrize(("name", "optimizer", "shape"), CASES)
def test_rows_without_gradient_keep_value_and_state(
    name: str, optimizer: str, shape: tuple[int, int]
) -> None:
    cls, options = OPTIMIZERS[optimizer]
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    reference = Lazy(start, cls, **options)
    with allstep.kvstore.create(name) as kv:
        kv.init("t", start)
        kv.set_optimizer(cls, **options)
        last = shape[0] - 1
        for seed, rows in enumerate([[1, last, 1], [0, 1], [], [last, 2, 2, 0]]):
            gradient = rows_of(shape, rows, seed)
            kv.push("t", gradient)
            reference.push(gradient)
            torch.testing.assert_close(pulled(kv, "t", shape), reference.value.detach())
        states = kv._values.state(kv._values.keys["t"])
        tables = reference.tables()
        assert {name for name, _, _ in states} >= set(tables) - {""}
        for state, _, value in states:
            if state in tables:
                torch.testing.assert_close(value, tables[state])


def test_an_embedding_trains_as_in_one_process(ranks: Ranks) -> None:
    """The gradients of nn.Embedding as they are, two workers, only the rows of the batch pulled."""
    words = torch.randint(0, SHAPE[0], (6, 2, 8), generator=torch.Generator().manual_seed(0))

    def gradient(table: nn.Embedding, batch: Tensor) -> Tensor:
        table.weight.grad = None
        table(batch).square().sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad

    def work() -> None:
        torch.manual_seed(0)
        table = nn.Embedding(*SHAPE, sparse=True)
        reference = Lazy(table.weight.detach(), torch.optim.SGD, lr=0.01, momentum=0.9)
        rows = torch.sparse_coo_tensor(size=SHAPE, check_invariants=False)
        with allstep.kvstore.create("dist_sync") as kv:
            kv.init("t", table.weight)
            kv.set_optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
            for step in words:
                kv.row_sparse_pull("t", out=rows, row_ids=step[kv.rank])
                with torch.no_grad():
                    table.weight.index_copy_(0, rows.indices()[0], rows.values())
                kv.push("t", gradient(table, step[kv.rank]))
                with torch.no_grad():
                    whole = nn.Embedding(*SHAPE, sparse=True)
                    whole.weight.copy_(reference.value)
                reference.push(gradient(whole, step[0]).clone() + gradient(whole, step[1]))
            torch.testing.assert_close(pulled(kv, "t", SHAPE), reference.value.detach())

    ranks(2, work)


def test_rows_of_workers_are_added_in_rank_order(ranks: Ranks) -> None:
    """Some rows of both, in one round; a dense gradient makes a round dense; without an optimizer
    the sum replaces the value."""

    def work() -> None:
        shape = (900, 700)
        with allstep.kvstore.create("dist_sync") as kv:
            kv.init("t", torch.ones(shape))
            for rows in ([[0, 5, 899], [5, 450]], [[], [3]], [[], []]):
                parts = [rows_of(shape, each, rank) for rank, each in enumerate(rows)]
                kv.push("t", parts[kv.rank])
                assert torch.equal(pulled(kv, "t", shape), sum(each.to_dense() for each in parts))
            dense = torch.randn(shape, generator=torch.Generator().manual_seed(9))
            rows = rows_of(shape, [1, 899, 1], 4)
            for first in (True, False):
                kv.push("t", dense if (kv.rank == 0) == first else rows)
                assert torch.equal(pulled(kv, "t", shape), dense + rows.to_dense())
            # Two pushes without a pull are two rounds.
            kv.push("t", rows)
            kv.push("t", [rows, rows_of(shape, [7], 5)])
            expected = 2 * (rows.to_dense() + rows_of(shape, [7], 5).to_dense())
            torch.testing.assert_close(pulled(kv, "t", shape), expected)

    ranks(2, work)


@pytest.mark.parametrize("name", ["dist_async", "dist_stale:2"])
def test_a_pull_of_rows_is_between_two_pushes(ranks: Ranks, name: str) -> None:
    """All rows are pushed, so all rows that are pulled are equal; and no push is lost."""

    def work() -> None:
        shape, steps = (900, 700), 15
        ones = torch.sparse_coo_tensor(
            torch.arange(900).unsqueeze(0), torch.full(shape, -1.0), shape, check_invariants=False
        )
        out = torch.sparse_coo_tensor(size=shape, check_invariants=False)
        with allstep.kvstore.create(name) as kv:
            kv.init("t", torch.zeros(shape))
            kv.set_optimizer(torch.optim.SGD, lr=1.0)
            before = 0.0
            for _ in range(steps):
                kv.row_sparse_pull("t", out=out, row_ids=torch.tensor([899, 0, 450]))
                values = out.values()
                assert (values == values[0, 0]).all() and values[0, 0] >= before
                before = values[0, 0].item()
                kv.push("t", ones)
            kv.barrier()
            assert (pulled(kv, "t", shape) == steps * kv.num_workers).all()

    ranks(2, work)


def test_half_precision_rows_have_master_weights() -> None:
    with allstep.kvstore.create("dist_async") as kv:
        kv.init("t", torch.ones(900, 700, dtype=torch.bfloat16))
        kv.set_optimizer(torch.optim.SGD, lr=1e-3, multi_precision=True)
        ones = torch.sparse_coo_tensor(
            torch.tensor([[0, 899]]),
            torch.ones(2, 700, dtype=torch.bfloat16),
            (900, 700),
            check_invariants=False,
        )
        for _ in range(50):
            kv.push("t", ones)
        out = torch.empty(900, 700, dtype=torch.bfloat16)
        kv.pull("t", out=out)
        assert (out[[0, 899]] == torch.tensor(0.95, dtype=torch.bfloat16)).all()
        assert (out[1:899] == 1).all()


def test_a_function_gets_the_sparse_gradient() -> None:
    with allstep.kvstore.create("local") as kv:
        kv.init("t", torch.zeros(5, 2, 3))
        kv.set_updater(lambda key, gradient, value: value.add_(gradient, alpha=2))
        gradient = rows_of((5, 2, 3), [4, 1, 4], 0)
        kv.push("t", gradient)
        torch.testing.assert_close(pulled(kv, "t", (5, 2, 3)), 2 * gradient.to_dense())


def test_the_state_continues_in_another_store(tmp_path: Any) -> None:
    cls, options = OPTIMIZERS["adam"]
    reference = Lazy(torch.zeros(SHAPE), cls, **options)
    path, value = tmp_path / "states", torch.zeros(SHAPE)
    for seed in range(3):
        with allstep.kvstore.create("dist_sync") as kv:
            kv.init("t", value)
            kv.set_optimizer(cls, **options)
            if seed:
                kv.load_optimizer_states(path)
            gradient = rows_of(SHAPE, [seed, 5, 899], seed)
            kv.push("t", gradient)
            reference.push(gradient)
            kv.pull("t", out=value)
            kv.save_optimizer_states(path)
    torch.testing.assert_close(value, reference.value.detach())


@settings(max_examples=15)
@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.lists(st.lists(st.integers(0, 39), max_size=12), min_size=1, max_size=6),
    st.sampled_from(list(OPTIMIZERS)),
)
def test_random_rows(num_rows: int, width: int, pushes: list[list[int]], optimizer: str) -> None:
    cls, options = OPTIMIZERS[optimizer]
    start = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1))
    reference, kv = Lazy(start, cls, **options), allstep.kvstore.create("local")
    kv.init("t", start)
    kv.set_optimizer(cls, **options)
    for seed, rows in enumerate(pushes):
        gradient = rows_of((num_rows, width), [row % num_rows for row in rows], seed)
        kv.push("t", gradient)
        reference.push(gradient)
    torch.testing.assert_close(pulled(kv, "t", (num_rows, width)), reference.value.detach())
    out = torch.sparse_coo_tensor(size=(num_rows, width), check_invariants=False)
    kv.row_sparse_pull("t", out=out, row_ids=[row % num_rows for row in pushes[0]])
    wanted = sorted({row % num_rows for row in pushes[0]})
    torch.testing.assert_close(out.values(), reference.value.detach()[wanted])


def sparse(dim: int) -> Tensor:
    return torch.eye(3).to_sparse(dim)


def outside() -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([[3]]), torch.ones(1, 3), (3, 3), check_invariants=False
    )


WRONG: dict[str, tuple[Any, str]] = {
    "places of elements": (
        lambda kv: kv.push("t", sparse(2)),
        "not made of rows; expected a sparse COO tensor with sparse_dim 1, as of nn.Embedding",
    ),
    "dense and sparse": (
        lambda kv: kv.push("t", [sparse(1), torch.eye(3)]),
        "some of its values are sparse and others are not; pass value.to_dense",
    ),
    "other type": (
        lambda kv: kv.push("t", sparse(1).double()),
        r"push: key 't' is float32 \[3, 3\], found float64 \[3, 3\]",
    ),
    "pushpull": (
        lambda kv: kv.pushpull("t", sparse(1)),
        r"sparse, and only push takes sparse gradients; pass value.to_dense\(\)",
    ),
    "init": (lambda kv: kv.init("u", sparse(1)), "only push takes sparse gradients"),
    "of a vector": (
        lambda kv: kv.push("v", torch.ones(3).to_sparse(1)),
        "the gradient is not made of rows",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", ["local", "dist_sync"])
def test_a_mistake_gets_one_line(name: str, what: str) -> None:
    call, text = WRONG[what]
    with allstep.kvstore.create(name) as kv:
        kv.init(["t", "v"], [torch.zeros(3, 3), torch.zeros(3)])
        with pytest.raises(UserError, match=text) as caught:
            call(kv)
        assert "\n" not in str(caught.value)
        assert not pulled(kv, "t", (3, 3)).any()


def test_compressed_stores_take_no_rows() -> None:
    with allstep.kvstore.create("dist_sync") as kv:
        kv.init("t", torch.zeros(3, 3))
        kv.set_gradient_compression({"type": "2bit"})
        text = "compression 2bit:0.5 takes dense gradients, and this one is sparse; put the key"
        with pytest.raises(UserError, match=text):
            kv.push("t", sparse(1))


def test_optimizers_with_norms_of_layers_take_no_rows() -> None:
    from allstep.optim import LAMB

    with allstep.kvstore.create("dist_async") as kv:
        kv.init("t", torch.zeros(3, 3))
        kv.set_optimizer(LAMB, lr=0.1)
        with pytest.raises(UserError, match=r"LAMB uses norms of whole layers, .* push value.to_d"):
            kv.push("t", sparse(1))
