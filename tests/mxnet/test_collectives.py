"""The collectives against numpy, for the dtypes of MXNet; the memory is shared, not copied."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.ranks import Ranks

DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64")
SHAPES = ((17,), (6, 5), (4, 3, 2))


def values(rank: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Small numbers, so that sums and products of all dtypes are exact."""
    drawn = np.random.default_rng([rank, len(shape)]).integers(1, 6, shape)
    return drawn.astype(dtype)


def mean(arrays: list[Any]) -> Any:
    """Horovod's average: integers are truncated."""
    total = sum(array.astype("float64") for array in arrays) / len(arrays)
    return np.trunc(total) if arrays[0].dtype.kind in "iu" else total


def rows_of(total: Any, rank: int, size: int) -> Any:
    """The rows that reducescatter gives to a rank."""
    return np.array_split(total, size)[rank]


def check(found: Any, expected: Any, dtype: str, what: str) -> None:
    array = found.asnumpy()
    assert array.dtype == np.dtype(dtype), what
    assert array.shape == expected.shape, what
    np.testing.assert_array_equal(array.astype("float64"), expected.astype("float64"), what)


def reductions(hvd: Any) -> dict[int, Callable[[list[Any]], Any]]:
    return {
        hvd.Average: mean,
        hvd.Sum: sum,
        hvd.Min: lambda arrays: np.minimum.reduce(arrays),
        hvd.Max: lambda arrays: np.maximum.reduce(arrays),
        hvd.Product: lambda arrays: np.multiply.reduce(arrays),
    }


def check_dtype_and_shape(hvd: Any, mx: Any, dtype: str, shape: tuple[int, ...]) -> None:
    """All collectives for one dtype and shape."""
    rank, size = hvd.rank(), hvd.size()
    all_values = [values(each, shape, dtype) for each in range(size)]
    own = mx.nd.array(all_values[rank], dtype=dtype)
    what = f"{dtype} {shape}"
    for op, expected in reductions(hvd).items():
        check(hvd.allreduce(own, op=op), expected(all_values), dtype, what)
        check(own, all_values[rank], dtype, what)
        copy = own.copy()
        assert hvd.allreduce_(copy, op=op, name="in place") is copy
        check(copy, expected(all_values), dtype, what)
    check(hvd.allgather(own), np.concatenate(all_values), dtype, what)
    for root in range(size):
        check(hvd.broadcast(own, root), all_values[root], dtype, what)
        copy = own.copy()
        assert hvd.broadcast_(copy, root_rank=root, name="in place") is copy
        check(copy, all_values[root], dtype, what)
    check(own, all_values[rank], dtype, what)
    for op, expected in ((hvd.Average, mean), (hvd.Sum, sum)):
        rows = rows_of(expected(all_values), rank, size)
        check(hvd.reducescatter(own, op=op), rows, dtype, what)


def check_groups(hvd: Any, mx: Any) -> None:
    """Groups of different dtypes and shapes in one call."""
    rank, size = hvd.rank(), hvd.size()
    kinds = [("float32", (4, 3)), ("int64", (5,)), ("float16", (2, 2, 2)), ("float32", (3,))]
    by_rank = [[values(each, shape, dtype) for dtype, shape in kinds] for each in range(size)]
    own = [mx.nd.array(array, dtype=array.dtype) for array in by_rank[rank]]
    sums = [sum(arrays) for arrays in zip(*by_rank, strict=True)]
    for array, total in zip(hvd.grouped_allreduce(own, op=hvd.Sum), sums, strict=True):
        check(array, total, str(total.dtype), "grouped_allreduce")
    gathered = hvd.grouped_allgather(own, name="group")
    for array, arrays in zip(gathered, zip(*by_rank, strict=True), strict=True):
        check(array, np.concatenate(arrays), str(arrays[0].dtype), "grouped_allgather")
    for array, total in zip(hvd.grouped_reducescatter(own, op=hvd.Sum), sums, strict=True):
        check(array, rows_of(total, rank, size), str(total.dtype), "grouped_reducescatter")
    assert hvd.grouped_allreduce_(own, op=hvd.Sum) is own
    for array, total in zip(own, sums, strict=True):
        check(array, total, str(total.dtype), "grouped_allreduce_")
    assert hvd.grouped_allreduce([]) == hvd.grouped_allreduce_([]) == []


def check_rows(hvd: Any, mx: Any) -> None:
    """Different numbers of rows on the ranks, none included."""
    rank, size = hvd.rank(), hvd.size()
    rows = mx.nd.ones((rank + 1, 2)) * rank
    expected = np.concatenate([np.full((each + 1, 2), each) for each in range(size)])
    check(hvd.allgather(rows), expected, "float32", "allgather of different rows")
    # Rank r sends r+1 rows to rank 0 and none to the others.
    splits = [rank + 1] + [0] * (size - 1)
    for given in (splits, np.array(splits), mx.nd.array(splits, dtype="int32")):
        found, received = hvd.alltoall(rows, given)
        whole = expected if rank == 0 else np.empty((0, 2))
        check(found, whole, "float32", "alltoall")
        counts = np.arange(1, size + 1) if rank == 0 else np.zeros(size)
        check(received, counts, "int32", "received splits")
    equal = hvd.alltoall(mx.nd.arange(2 * size) + 10 * rank)
    expected = np.concatenate(
        [[2 * rank + 10 * each, 2 * rank + 1 + 10 * each] for each in range(size)]
    )
    check(equal, expected, "float32", "alltoall in equal parts")


def check_scaling(hvd: Any, mx: Any) -> None:
    size = hvd.size()
    scaled = {"prescale_factor": 0.5, "postscale_factor": 4.0, "op": hvd.Sum}
    ones = mx.nd.ones((size, 3))
    whole = np.full((size, 3), 2.0 * size)
    check(hvd.allreduce(ones, **scaled), whole, "float32", "scaled")
    check(hvd.grouped_allreduce([ones], **scaled)[0], whole, "float32", "scaled")
    check(hvd.reducescatter(ones, **scaled), whole[:1], "float32", "scaled")
    with pytest.warns(DeprecationWarning, match="average= is deprecated"):
        check(hvd.allreduce(ones, average=False), np.full((size, 3), size), "float32", "sum")


def check_kinds_of_arrays(hvd: Any, mx: Any) -> None:
    """Scalars, views, `mx.np` arrays, arrays that MXNet is still computing, objects."""
    rank, size = hvd.rank(), hvd.size()
    assert hvd.allreduce(mx.nd.array(rank + 1.0), op=hvd.Sum).shape == ()
    whole = mx.nd.zeros((4, 3))
    hvd.allreduce_(whole[1:3], op=hvd.Sum, name="view")
    part = whole[2:]
    part += 1
    hvd.allreduce_(part, op=hvd.Sum)
    check(whole, np.repeat([[0], [0], [size], [size]], 3, 1), "float32", "a view of rows")
    modern = hvd.allreduce(mx.np.ones((2, 2)), op=hvd.Sum)
    assert type(modern) is mx.np.ndarray and float(modern.sum()) == 4 * size
    other = mx.cpu(rank)
    on_other = hvd.allreduce(mx.nd.ones((2,), ctx=other), op=hvd.Sum)
    assert on_other.context == other and on_other.asnumpy().tolist() == [size, size]
    large = mx.nd.ones((600, 600)) * 0.5
    for _ in range(5):
        large = mx.nd.dot(large, mx.nd.ones((600, 600))) / 600
        hvd.allreduce_(large)
    assert float(large.min().asscalar()) == float(large.max().asscalar()) == 0.5
    sent = {"from": rank, "array": np.arange(3)}
    assert hvd.broadcast_object(sent, root_rank=size - 1)["from"] == size - 1
    assert [each["from"] for each in hvd.allgather_object(sent)] == list(range(size))


def check_memory(mx: Any) -> None:
    """Views and results share the memory of their origin."""
    from allstep.mxnet.ndarray_views import read_view, to_mxnet, write_view

    array = mx.nd.zeros((3, 2))
    view = write_view(array)
    view += 1
    check(array, np.ones((3, 2)), "float32", "written through a view")
    assert read_view(array).data_ptr() == view.data_ptr()
    assert read_view(to_mxnet(view, array)).data_ptr() == view.data_ptr()


def check_compression(hvd: Any, mx: Any) -> None:
    for dtype in DTYPES:
        array = mx.nd.ones((3, 2), dtype=dtype)
        sent, context = hvd.Compression.fp16.compress(array)
        assert sent.dtype == (np.float16 if dtype.startswith("float") else array.dtype)
        check(hvd.Compression.fp16.decompress(sent, context), np.ones((3, 2)), dtype, "fp16")
        assert hvd.Compression.none.compress(array)[0] is array


def work() -> None:
    import allstep.mxnet as hvd

    import mxnet as mx  # isort: skip

    hvd.init()
    for dtype in DTYPES:
        for shape in SHAPES:
            check_dtype_and_shape(hvd, mx, dtype, shape)
    check_groups(hvd, mx)
    check_rows(hvd, mx)
    check_scaling(hvd, mx)
    check_kinds_of_arrays(hvd, mx)
    check_memory(mx)
    check_compression(hvd, mx)
    hvd.shutdown()


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("size", [1, 2])
def test_against_numpy(ranks: Ranks, size: int) -> None:
    ranks(size, work, timeout=150)


def with_sets() -> None:
    import allstep.mxnet as hvd

    import mxnet as mx  # isort: skip

    outer = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[outer])
    rank = hvd.rank()
    if outer.included():
        own = mx.nd.ones((2,)) * (rank + 1)
        check(hvd.allreduce(own, process_set=outer), np.full(2, 2.0), "float32", "set")
        check(hvd.broadcast(own, 2, process_set=outer), np.full(2, 3.0), "float32", "root 2")
        check(hvd.allgather(own, process_set=outer), np.array([1, 1, 3, 3]), "float32", "set")
    weight, gradient = mx.nd.zeros((2,)), mx.nd.ones((2,)) * (rank + 1)
    plain = mx.optimizer.create("sgd", learning_rate=1.0)
    optimizer = hvd.DistributedOptimizer(plain, process_set=outer)
    optimizer.update(0, weight, gradient, optimizer.create_state(0, weight))
    parameter = mx.gluon.Parameter("weight", shape=(2,))
    parameter.initialize(init="zeros")
    trainer = hvd.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, process_set=outer)
    with mx.autograd.record():
        loss = (parameter.data() * (rank + 1)).sum()
    loss.backward()
    trainer.step(1)
    # Rank 1 is outside and updates with its own gradient, 2; the mean of the others is 2, too.
    for found in (weight, parameter.data()):
        check(found, np.full(2, -2.0), "float32", f"update of rank {rank}")
    # No rank stops the others before they are done.
    hvd.allgather_object(rank, name="end")
    hvd.shutdown()


@pytest.mark.usefixtures("peers")
def test_process_sets(ranks: Ranks) -> None:
    ranks(3, with_sets)
