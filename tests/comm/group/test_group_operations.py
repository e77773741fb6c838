"""Every operation on every dtype and layout, against what plain torch computes from the same
numbers in one process.

Inputs are drawn from (seed, rank), so that each rank knows the inputs of all and computes what it
should get. Floats hold small whole numbers: their sums are exact in any order, and results are
compared bit by bit.
"""

import os
import random
from collections.abc import Callable
from functools import reduce as fold
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.default_group import joined
from support.ranks import Ranks

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTS, *COMPLEX, torch.bool]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (4, 3, 2), (1025,)]
WORLDS = [1, 2, 5]
Run = Callable[..., list[Any]]


@pytest.fixture(params=["shared memory", "gloo", "hosts"])
def run(ranks: Ranks, request: pytest.FixtureRequest) -> Run:
    """`ranks`, with all that a group of one host uses, with Gloo alone, and on two hosts (of five
    ranks three are on the first)."""

    def start(
        num_ranks: int, function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        hosts = ["a", "b", "a", "b", "a"][:num_ranks] if request.param == "hosts" else None
        env = {"ONLY_GLOO": "1"} if request.param == "gloo" else {}
        return ranks(num_ranks, function, *args, env=env, hosts=hosts, **options)

    return start


def draw(dtype: torch.dtype, shape: tuple[int, ...], seed: int, layout: str = "plain") -> Tensor:
    """A tensor of small whole numbers. `layout` says how it lies in memory."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(
        0 if dtype in (torch.bool, torch.uint8) else -3, 4, shape, generator=generator
    )
    if dtype in COMPLEX:
        values = torch.complex(
            numbers.double(), numbers.flip(0).double() if shape else numbers.double()
        ).to(dtype)
    else:
        values = numbers.to(dtype)
    return lay(values, layout)


def lay(values: Tensor, layout: str) -> Tensor:
    """A copy that lies in memory as told."""
    values = values.clone()
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and values.dim():
        wide = torch.zeros((*values.shape[:-1], values.shape[-1] * 2), dtype=values.dtype)
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "gradient" and (values.is_floating_point() or values.is_complex()):
        return values.requires_grad_()
    return values


LAYOUTS = ["plain", "transposed", "strided", "gradient"]


def reduced(op: str, tensors: list[Tensor]) -> Tensor | None:
    """What the operation should give; None where it has no meaning and must be refused."""
    dtype = tensors[0].dtype
    tensors = [tensor.detach() for tensor in tensors]
    if dtype is torch.bool:
        return reduced_bools(op, tensors)
    if dtype in COMPLEX:
        if op not in ("SUM", "AVG", "PRODUCT"):
            return None
        total = fold(torch.mul if op == "PRODUCT" else torch.add, tensors)
        return total / len(tensors) if op == "AVG" else total
    if dtype.is_floating_point:
        return reduced_floats(op, tensors)
    return reduced_ints(op, tensors)


def reduced_bools(op: str, tensors: list[Tensor]) -> Tensor | None:
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        **dict.fromkeys(("SUM", "MAX", "BOR"), torch.logical_or),
        **dict.fromkeys(("PRODUCT", "MIN", "BAND"), torch.logical_and),
        "BXOR": torch.logical_xor,
    }
    return fold(ways[op], tensors) if op in ways else None


def reduced_floats(op: str, tensors: list[Tensor]) -> Tensor | None:
    exact = torch.stack([tensor.double() for tensor in tensors])
    ways = {"SUM": exact.sum(0), "AVG": exact.sum(0) / len(tensors), "PRODUCT": exact.prod(0)}
    ways |= {"MIN": exact.amin(0), "MAX": exact.amax(0)}
    if tensors[0].dtype is torch.float32 and op == "AVG":
        return exact.sum(0).float() / len(tensors)
    return ways[op].to(tensors[0].dtype) if op in ways else None


def reduced_ints(op: str, tensors: list[Tensor]) -> Tensor | None:
    """With Python's numbers, which do not wrap, and then cut to the dtype's bits."""
    dtype, bits = tensors[0].dtype, 8 * tensors[0].element_size()
    if dtype is torch.uint64 and op == "AVG":
        return None
    ways: dict[str, Callable[[list[int]], int]] = {
        "SUM": sum,
        "AVG": lambda numbers: int(sum(numbers) / len(numbers)),
        "PRODUCT": lambda numbers: fold(lambda a, b: a * b, numbers),
        "MIN": min,
        "MAX": max,
        "BAND": lambda numbers: fold(lambda a, b: a & b, numbers),
        "BOR": lambda numbers: fold(lambda a, b: a | b, numbers),
        "BXOR": lambda numbers: fold(lambda a, b: a ^ b, numbers),
    }
    columns = zip(*(tensor.reshape(-1).tolist() for tensor in tensors), strict=True)
    signed = [wrapped(ways[op](list(column)), bits) for column in columns]
    narrow = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    return torch.tensor(signed, dtype=narrow).view(dtype).view(tensors[0].shape)


def wrapped(number: int, bits: int) -> int:
    return (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def same(found: Tensor, expected: Tensor, what: object) -> None:
    found, expected = found.detach(), expected.detach()
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    assert torch.equal(bits(found), bits(expected)), (what, found, expected)


def bits(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def call(tensor: Tensor, op: str) -> None:
    """As `dist.all_reduce`, which looks at complex tensors itself, past that look."""
    opts = dist.AllreduceOptions()
    opts.reduceOp = getattr(dist.ReduceOp, op)
    dist.group.WORLD.allreduce([tensor], opts).wait()


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_all_reduce(run: Run, num_ranks: int) -> None:
    def work() -> None:
        with joined() as (rank, size):
            for number, dtype in enumerate(DTYPES):
                for op in OPS:
                    shape = SHAPES[(number + OPS.index(op)) % len(SHAPES)]
                    layout = LAYOUTS[(number + OPS.index(op)) % 4]
                    tensor = draw(dtype, shape, rank, layout)
                    expected = reduced(op, [draw(dtype, shape, each) for each in range(size)])
                    what = (dtype, op, shape, layout)
                    if expected is None:
                        refused(lambda tensor=tensor, op=op: call(tensor, op), op, str(dtype))
                    else:
                        call(tensor, op)
                        same(tensor, expected, what)

    run(num_ranks, work)


def test_all_shapes_and_layouts(run: Run) -> None:
    def work() -> None:
        with joined() as (rank, size):
            for shape in SHAPES:
                for layout in LAYOUTS:
                    for dtype in (torch.float32, torch.int16, torch.bool):
                        what = (shape, layout, dtype)
                        inputs = [draw(dtype, shape, each) for each in range(size)]
                        tensor = draw(dtype, shape, rank, layout)
                        dist.all_reduce(tensor)
                        same(tensor, reduced("SUM", inputs), ("all_reduce", *what))
                        tensor = draw(dtype, shape, rank, layout)
                        dist.broadcast(tensor, 1)
                        same(tensor, inputs[1], ("broadcast", *what))
                        tensor = draw(dtype, shape, rank, layout)
                        dist.reduce(tensor, 2)
                        same(
                            tensor,
                            reduced("SUM", inputs) if rank == 2 else inputs[rank],
                            ("reduce", *what),
                        )
                        outputs = [draw(dtype, shape, 99, layout).detach() for _ in range(size)]
                        dist.all_gather(outputs, draw(dtype, shape, rank, layout))
                        for each, found in enumerate(outputs):
                            same(found, inputs[each], ("all_gather", *what))

    run(3, work)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_reduce_to_a_root(run: Run, num_ranks: int) -> None:
    def work() -> None:
        with joined() as (rank, size):
            for number, dtype in enumerate(DTYPES):
                for op in OPS:
                    root = (number + len(op)) % size
                    inputs = [draw(dtype, (3, 4), each) for each in range(size)]
                    expected = reduced(op, inputs)
                    if expected is None or dtype in COMPLEX:
                        continue  # dist.reduce refuses complex products, and makes the rest real
                    tensor = inputs[rank].clone()
                    dist.reduce(tensor, root, getattr(dist.ReduceOp, op))
                    same(tensor, expected if rank == root else inputs[rank], (dtype, op, root))

    run(num_ranks, work)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_reduce_scatter(run: Run, num_ranks: int) -> None:
    def work() -> None:
        with joined() as (rank, size):
            for number, dtype in enumerate(DTYPES):
                for op in OPS:
                    layout = LAYOUTS[:3][(number + len(op)) % 3]
                    mine = [
                        [draw(dtype, (to + 1, 2), 10 * each + to) for to in range(size)]
                        for each in range(size)
                    ]
                    expected = reduced(op, [mine[each][rank] for each in range(size)])
                    output = draw(dtype, (rank + 1, 2), 99, layout)
                    inputs = [lay(tensor, layout) for tensor in mine[rank]]
                    group_op = getattr(dist.ReduceOp, op)
                    opts = dist.ReduceScatterOptions()
                    opts.reduceOp = group_op
                    if expected is None:
                        refused(
                            lambda output=output, inputs=inputs, opts=opts: (
                                dist.group.WORLD.reduce_scatter([output], [inputs], opts)
                            ),
                            op,
                            str(dtype),
                        )
                        continue
                    dist.group.WORLD.reduce_scatter([output], [inputs], opts).wait()
                    same(output, expected, ("uneven", dtype, op))
                    whole = torch.stack([draw(dtype, (3,), 10 * rank + to) for to in range(size)])
                    expected = reduced(
                        op, [draw(dtype, (3,), 10 * each + rank) for each in range(size)]
                    )
                    output = draw(dtype, (3,), 99)
                    dist.group.WORLD.reduce_scatter_single(output, whole, opts).wait()
                    same(output, expected, ("single", dtype, op))

    run(num_ranks, work)


def test_reduce_scatter_into_its_own_input(run: Run) -> None:
    def work() -> None:
        with joined() as (rank, size):
            whole = draw(torch.float32, (size * 5,), rank)
            output = whole[rank * 5 : rank * 5 + 5]
            dist.reduce_scatter_tensor(output, whole)
            every = [
                draw(torch.float32, (size * 5,), each)[rank * 5 : rank * 5 + 5]
                for each in range(size)
            ]
            same(output, reduced("SUM", every), "aliased")

    run(3, work)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_scaled_sum(run: Run, num_ranks: int) -> None:
    """PREMUL_SUM, with which FSDP2 divides."""

    def work() -> None:
        with joined() as (rank, size):
            premultiplied = torch.distributed._make_nccl_premul_sum
            for dtype in [*FLOATS, *COMPLEX, *INTS]:
                inputs = [draw(dtype, (3, 4), each) for each in range(size)]
                factor = 0.5 if dtype in FLOATS + COMPLEX else 2.0
                if dtype in INTS:
                    expected = reduced_ints("SUM", inputs + inputs)
                else:
                    exact = sum(each.to(torch.complex128) * factor for each in inputs)
                    expected = (exact if dtype in COMPLEX else exact.real).to(dtype)
                tensor = inputs[rank].clone()
                dist.all_reduce(tensor, premultiplied(factor))
                same(tensor, expected, (dtype, "all_reduce"))
                if dtype not in COMPLEX:
                    tensor = inputs[rank].clone()
                    dist.all_reduce(tensor, premultiplied(torch.tensor(factor)))
                    same(tensor, expected, (dtype, "tensor as factor"))
            refused(
                lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), premultiplied(0.5)),
                "int32",
                "0.5",
            )
            refused(
                lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), premultiplied(2.0)),
                "PREMUL_SUM",
                "bool",
            )

    run(num_ranks, work)


def test_the_mean_of_halves_does_not_overflow(ranks: Ranks) -> None:
    def work() -> None:
        with joined() as (_, size):
            half = torch.full((2,), 60000.0, dtype=torch.float16)
            dist.all_reduce(half, torch.distributed._make_nccl_premul_sum(1 / size))
            dist.all_reduce(half, dist.ReduceOp.AVG)
            assert half.tolist() == [60000.0] * 2

    ranks(3, work, env={"ONLY_GLOO": "1"})


def test_integers_wrap_as_torch_does(run: Run) -> None:
    def work() -> None:
        with joined() as (rank, size):
            for dtype in INTS:
                top = torch.iinfo(dtype).max
                tensor = torch.tensor([top - rank, rank], dtype=dtype)
                for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):
                    every = [torch.tensor([top - each, each], dtype=dtype) for each in range(size)]
                    expected = reduced(op, every)
                    found = tensor.clone()
                    if expected is None or (op == "AVG" and dtype is torch.int64):
                        continue
                    call(found, op)
                    same(found, expected, (dtype, op))

    run(3, work)


def test_what_torch_cannot_add(run: Run) -> None:
    def work() -> None:
        with joined():
            eight = torch.ones(4).to(torch.float8_e5m2)
            refused(lambda: dist.all_reduce(eight), "float8_e5m2", "SUM")
            dist.broadcast(eight, 0)  # moving is no arithmetic
            assert eight.float().tolist() == [1.0] * 4

    run(2, work)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_gathering(run: Run, num_ranks: int) -> None:
    def work() -> None:
        with joined() as (rank, size):
            for number, dtype in enumerate(DTYPES):
                layout = LAYOUTS[:3][number % 3]
                root = number % size
                sizes = [(0 if each == number % 3 else each + 1, 2) for each in range(size)]
                inputs = [draw(dtype, sizes[each], each) for each in range(size)]
                own = lay(inputs[rank], layout)
                outputs = [lay(draw(dtype, shape, 99), layout) for shape in sizes]
                dist.all_gather(outputs, own)
                for found, expected in zip(outputs, inputs, strict=True):
                    same(found, expected, ("all_gather, uneven", dtype))
                outputs = [lay(draw(dtype, shape, 99), layout) for shape in sizes]
                dist.gather(own, outputs if rank == root else None, root)
                for found, expected in zip(outputs, inputs, strict=True):
                    same(
                        found,
                        expected if rank == root else draw(dtype, found.shape, 99),
                        ("gather", dtype),
                    )
                output = draw(dtype, sizes[rank], 98, layout)
                dist.scatter(
                    output, [lay(each, layout) for each in inputs] if rank == root else None, root
                )
                same(output, inputs[rank], ("scatter", dtype))
                whole = draw(dtype, (size, 3), 97, layout)
                dist.all_gather_into_tensor(whole, draw(dtype, (1, 3), rank, layout).detach())
                same(
                    whole,
                    torch.cat([draw(dtype, (1, 3), each) for each in range(size)]),
                    ("single", dtype),
                )

    run(num_ranks, work)


def test_all_gather_from_a_part_of_its_output(run: Run) -> None:
    def work() -> None:
        with joined() as (rank, size):
            whole = torch.full((size * 4,), -1.0)
            own = whole[rank * 4 : rank * 4 + 4]
            own.fill_(rank)
            dist.all_gather_into_tensor(whole, own)
            same(whole, torch.arange(float(size)).repeat_interleave(4), "aliased")

    run(3, work)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_all_to_all(run: Run, num_ranks: int) -> None:
    def work() -> None:
        with joined() as (rank, size):
            for number, dtype in enumerate(DTYPES):
                layout = LAYOUTS[:3][number % 3]

                def piece(source: int, to: int, dtype: torch.dtype = dtype) -> Tensor:
                    return draw(dtype, ((source * to) % 3, 2), 10 * source + to)

                expected = [piece(each, rank) for each in range(size)]
                outputs = [lay(torch.zeros_like(each), layout) for each in expected]
                dist.all_to_all(outputs, [lay(piece(rank, to), layout) for to in range(size)])
                for found, each in zip(outputs, expected, strict=True):
                    same(found, each, ("all_to_all", dtype))
                whole = lay(torch.cat([piece(rank, to) for to in range(size)]), layout)
                output = lay(torch.zeros_like(torch.cat(expected)), layout)
                incoming = [each.shape[0] for each in expected]
                outgoing = [piece(rank, to).shape[0] for to in range(size)]
                dist.all_to_all_single(output, whole, incoming, outgoing)
                same(output, torch.cat(expected), ("with splits", dtype))
                output = draw(dtype, (2 * size,), 99, layout)
                dist.all_to_all_single(output, draw(dtype, (2 * size,), rank, layout))
                parts = [
                    draw(dtype, (2 * size,), each)[2 * rank : 2 * rank + 2] for each in range(size)
                ]
                same(output, torch.cat(parts), ("equal parts", dtype))

    run(num_ranks, work)


def test_wrong_arguments_are_named(run: Run) -> None:
    def work() -> None:
        with joined() as (_, size):
            two = [torch.zeros(2), torch.zeros(2)]
            refused(lambda: dist.all_gather(two, torch.zeros(2)), "2 tensors", "3 ranks")
            refused(
                lambda: dist.all_gather([torch.zeros(3)] * size, torch.zeros(2)), "(2,)", "(3,)"
            )
            refused(lambda: dist.reduce_scatter(torch.zeros(2), two), "reduce_scatter", "2 tensors")
            refused(
                lambda: dist.all_gather_into_tensor(torch.zeros(7), torch.zeros(2)),
                "(7,)",
                "3 times",
                "(2,)",
            )
            refused(
                lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(7)),
                "(7,)",
                "3 times",
                "(2,)",
            )
            refused(
                lambda: dist.all_to_all_single(torch.zeros(7), torch.zeros(7)),
                "(7,)",
                "equally",
                "3 ranks",
            )
            refused(
                lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 1, 2]),
                "[1, 1, 2]",
            )

    run(3, work)


def test_coalesced(run: Run) -> None:
    def work() -> None:
        with joined() as (rank, size):
            dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.int16, torch.bool]
            inputs = [
                [draw(dtype, (n, 2), 10 * each + n) for n, dtype in enumerate(dtypes)]
                for each in range(size)
            ]
            sums = [reduced("SUM", [inputs[each][n] for each in range(size)]) for n in range(5)]
            tensors = [lay(tensor, "strided") for tensor in inputs[rank]]
            dist.group.WORLD.allreduce_coalesced(tensors).wait()
            for found, expected in zip(tensors, sums, strict=True):
                same(found, expected, "allreduce_coalesced")
            outputs = [[torch.zeros_like(tensor) for tensor in inputs[rank]] for _ in range(size)]
            dist.group.WORLD.allgather_coalesced(outputs, inputs[rank]).wait()
            for each in range(size):
                for found, expected in zip(outputs[each], inputs[each], strict=True):
                    same(found, expected, "allgather_coalesced")
            tensors = [tensor.clone() for tensor in inputs[rank]]
            with dist._coalescing_manager(async_ops=True) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            manager.wait()
            for found, expected in zip(tensors, sums, strict=True):
                same(found, expected, "manager, all_reduce")
            wholes = [torch.zeros(size * 3) for _ in range(2)]
            with dist._coalescing_manager():
                for n, whole in enumerate(wholes):
                    dist.all_gather_into_tensor(whole, draw(torch.float32, (3,), 10 * rank + n))
            shares = [torch.zeros(3) for _ in range(2)]
            with dist._coalescing_manager():
                for share, whole in zip(shares, wholes, strict=True):
                    dist.reduce_scatter_tensor(share, whole)
            for n, share in enumerate(shares):
                same(
                    share,
                    draw(torch.float32, (3,), 10 * rank + n) * size,
                    "manager, there and back",
                )
            tensors = [torch.full((2,), float(rank)), torch.full((3,), float(rank))]
            with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
                for root, tensor in enumerate(tensors):
                    dist.broadcast(tensor, root, async_op=True)
            manager.wait()
            assert [tensor.tolist() for tensor in tensors] == [[0.0] * 2, [1.0] * 3]

    run(3, work)


def test_a_sparse_tensor(run: Run) -> None:
    def work() -> None:
        with joined() as (rank, _):
            tensor = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,))
            dist.all_reduce(tensor)
            assert tensor.to_dense().tolist() == [1.0, 1.0, 4.0, 0.0]

    run(2, work)


def test_lazily_conjugated(run: Run) -> None:
    def work() -> None:
        with joined() as (rank, size):
            values = draw(torch.complex64, (4,), rank)
            every = [
                draw(torch.complex64, (4,), each).conj().resolve_conj() for each in range(size)
            ]
            outputs = [torch.zeros(4, dtype=torch.complex64).conj() for _ in range(size)]
            dist.group.WORLD.allgather([outputs], [values.conj()]).wait()
            for found, expected in zip(outputs, every, strict=True):
                assert torch.equal(found, expected)
            summed = values.conj()
            call(summed, "SUM")
            assert torch.equal(summed, sum(every))

    run(2, work)


NAMES = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "ring",
]


def random_operations(seed: int, count: int) -> int:
    """The same random sequence on all ranks, on random sub-groups, some asynchronous and waited for
    in another order."""
    with joined() as (rank, size):
        dice = random.Random(seed)
        members = [list(range(size)), [0, size - 1], list(range(1, size)), [1, size - 1]]
        groups = [(ranks, dist.new_group(ranks)) for ranks in members]
        open_works: list[tuple[dist.Work, Callable[[], None]]] = []
        for number in range(count):
            name, dtype = dice.choice(NAMES), dice.choice(DTYPES)
            op = dice.choice(
                [each for each in OPS if reduced(each, [torch.zeros(1).to(dtype)] * 2) is not None]
            )
            shape = tuple(dice.randrange(5) for _ in range(dice.randrange(3))) or (
                dice.randrange(5000),
            )
            layout, later = dice.choice(LAYOUTS[:3]), dice.random() < 0.3
            who, group = dice.choice(groups)
            root, order = dice.choice(who), dice.random()
            if rank in who:
                case = (seed, number, name, dtype, op, shape, layout, who, root)
                open_works.append(operate(case, rank, group))
            if not later:
                random.Random(order * (rank + 1)).shuffle(open_works)
                for work, check in open_works:
                    work.wait()
                    check()
                open_works = []
        for work, check in open_works:
            work.wait()
            check()
        return count


def operate(
    case: tuple, rank: int, group: dist.ProcessGroup
) -> tuple[dist.Work, Callable[[], None]]:
    """Start one operation; the Work, and the check of its result."""
    _, number, name, dtype, op, shape, layout, who, root = case
    place = who.index(rank)
    inputs = [draw(dtype, shape, 1000 * number + each) for each in range(len(who))]
    own, places = (
        lay(inputs[place], layout),
        [lay(torch.zeros_like(each), layout) for each in inputs],
    )
    found: list[Tensor]
    expected: list[Tensor]
    if name in ("all_reduce", "reduce"):
        opts = dist.AllreduceOptions() if name == "all_reduce" else dist.ReduceOptions()
        opts.reduceOp = getattr(dist.ReduceOp, op)
        if name == "reduce":
            opts.rootRank = who.index(root)
        work = group.allreduce([own], opts) if name == "all_reduce" else group.reduce([own], opts)
        total = reduced(op, inputs)
        found, expected = [own], [total if name == "all_reduce" or rank == root else inputs[place]]
    elif name == "broadcast":
        work = dist.broadcast(own, root, group, async_op=True)
        found, expected = [own], [inputs[who.index(root)]]
    elif name == "all_gather":
        work = dist.all_gather(places, own, group, async_op=True)
        found, expected = places, inputs
    elif name == "gather":
        work = dist.gather(own, places if rank == root else None, root, group, async_op=True)
        found, expected = (places, inputs) if rank == root else ([], [])
    elif name == "scatter":
        work = dist.scatter(own, inputs if rank == root else None, root, group, async_op=True)
        found, expected = [own], [inputs[place]]
    elif name == "reduce_scatter":
        opts = dist.ReduceScatterOptions()
        opts.reduceOp = getattr(dist.ReduceOp, op)
        work = group.reduce_scatter([places[0]], [[lay(each, layout) for each in inputs]], opts)
        found, expected = [places[0]], [reduced(op, [inputs[place]] * len(who))]
    elif name == "all_to_all":
        work = dist.all_to_all(places, [lay(each, layout) for each in inputs], group, async_op=True)
        found, expected = places, [inputs[place]] * len(who)
    else:
        right, left = who[(place + 1) % len(who)], who[place - 1]
        sent = dist.isend(own, right, group, tag=number)
        work = dist.irecv(places[0], left, group, tag=number)
        found, expected = [places[0]], [inputs[place - 1]]

        def check_both() -> None:
            sent.wait()
            same(places[0], inputs[place - 1], case)

        return work, check_both

    def check() -> None:
        for one, other in zip(found, expected, strict=True):
            same(one, other, case)

    return work, check


@pytest.mark.soak(5)
def test_random_operations(run: Run) -> None:
    seed = int.from_bytes(os.urandom(4)) if os.environ.get("ALLSTEP_SOAK") else 1
    assert run(4, random_operations, seed, 200, timeout=150) == [200] * 4


@pytest.mark.soak(1)  # its count is in the test
@pytest.mark.timeout(600)
def test_many_random_operations(ranks: Ranks) -> None:
    count = 10_000 if os.environ.get("ALLSTEP_SOAK") else 2_000
    ranks(4, random_operations, 3, count, timeout=590)
