"""Every collective of allstep.tensorflow with its gradient against a model in numpy, in three modes."""

from typing import Any

import numpy
import pytest

from support.ranks import Ranks
from support.tensorflow_modes import modes, with_gradient

pytestmark = pytest.mark.usefixtures("peers")

REDUCED = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]
SENT = [*REDUCED, "uint16", "int16", "bool"]
SCATTERED = ["int32", "int64", "float16", "float32", "float64"]


def start() -> tuple[Any, Any, int, int]:
    import tensorflow as tf

    import allstep.tensorflow as hvd

    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        hvd.allreduce(tf.ones(1))
    hvd.init()
    return tf, hvd, hvd.rank(), hvd.size()


def stop(hvd: Any) -> None:
    hvd.join()
    hvd.shutdown()


def rows_of(rank: int, rows: int, dtype: str) -> Any:
    """What a rank contributes; every rank can make it."""
    return (numpy.arange(rows * 3).reshape(rows, 3) % 5 + rank).astype(dtype)


def cut(rows: int, size: int) -> list[slice]:
    """The rows of each rank after a reducescatter."""
    counts = [rows // size + (rank < rows % size) for rank in range(size)]
    ends = numpy.cumsum(counts)
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def check(found: Any, expected: Any, what: str) -> None:
    expected = numpy.asarray(expected)
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
    numpy.testing.assert_allclose(
        found.astype("float64"), expected.astype("float64"), rtol=1e-3, err_msg=what
    )


def collect() -> None:
    _, hvd, rank, size = start()
    for mode, run in modes():
        check_values(hvd, run, mode, rank, size)
        check_gradients(hvd, run, mode, rank, size)
        check_groups(hvd, run, mode, rank, size)
        check_places(hvd, run, mode, rank, size)
    stop(hvd)


def check_values(hvd: Any, run: Any, mode: str, rank: int, size: int) -> None:
    for dtype in REDUCED:
        given = [rows_of(r, 4, dtype) for r in range(size)]
        for name, op, expected in (
            ("sum", hvd.Sum, sum(given)),
            ("min", hvd.Min, numpy.min(given, 0)),
            ("max", hvd.Max, numpy.max(given, 0)),
            ("product", hvd.Product, numpy.prod(given, 0, dtype=dtype)),
            ("average", hvd.Average, (numpy.sum(given, 0, dtype="float64") / size).astype(dtype)),
        ):
            (found,) = run(lambda x, op=op: [hvd.allreduce(x, op=op)], given[rank])
            check(found, expected, f"allreduce {name} {dtype} {mode}")
    for dtype in SENT:
        given = [rows_of(r, 2 + r, dtype) for r in range(size)]
        (found,) = run(lambda x: [hvd.allgather(x)], given[rank])
        check(found, numpy.concatenate(given), f"allgather {dtype} {mode}")
        same = [rows_of(r, 2 * size, dtype) for r in range(size)]
        (found,) = run(lambda x: [hvd.broadcast(x, size - 1)], same[rank])
        check(found, same[-1], f"broadcast {dtype} {mode}")
        (found,) = run(lambda x: [hvd.alltoall(x)], same[rank])
        mine = slice(2 * rank, 2 * rank + 2)
        check(found, numpy.concatenate([each[mine] for each in same]), f"alltoall {dtype} {mode}")
    for dtype in SCATTERED:
        given = [rows_of(r, 5, dtype) for r in range(size)]
        (found,) = run(lambda x: [hvd.reducescatter(x, op=hvd.Sum)], given[rank])
        check(found, sum(given)[cut(5, size)[rank]], f"reducescatter {dtype} {mode}")
    empty = numpy.zeros((0 if rank else 3, 2), "float32")
    (found,) = run(lambda x: [hvd.allgather(x)], empty)
    assert found.shape == (3, 2), mode
    (found,) = run(lambda x: [hvd.allreduce(x, op=hvd.Sum)], numpy.float32(rank))
    assert found.shape == () and found == sum(range(size)), mode


def check_gradients(hvd: Any, run: Any, mode: str, rank: int, size: int) -> None:
    given = [rows_of(r, 4, "float64") for r in range(size)]
    weights = [numpy.cos(each) + r for r, each in enumerate(given)]
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
        how = {"op": op, "prescale_factor": 0.5, "postscale_factor": 3.0}
        both = with_gradient(lambda x, how=how: hvd.allreduce(x, **how), weights[rank])
        result, grad = run(both, given[rank])
        check(result, sum(given) * 1.5 * factor, f"allreduce with factors {mode}")
        check(grad, sum(weights) * 1.5 * factor, f"gradient of allreduce {mode}")
        both = with_gradient(
            lambda x, how=how: hvd.reducescatter(x, **how), weights[rank][cut(4, size)[rank]]
        )
        result, grad = run(both, given[rank])
        check(result, (sum(given) * 1.5 * factor)[cut(4, size)[rank]], f"reducescatter {mode}")
        parts = [each[part] for each, part in zip(weights, cut(4, size), strict=True)]
        times = size if op == hvd.Sum else 1
        check(grad, numpy.concatenate(parts) * 1.5 * times, f"gradient of reducescatter {mode}")
    _, grad = run(with_gradient(lambda x: hvd.broadcast(x, 0), weights[rank]), given[rank])
    expected = sum(weights) / size if rank == 0 else 0 * given[0]
    check(grad, expected, f"gradient of broadcast {mode}")
    own = given[rank][: 1 + rank]
    all_rows = sum(1 + r for r in range(size))
    weights = [numpy.sin(numpy.arange(all_rows * 3).reshape(all_rows, 3) + r) for r in range(size)]
    _, grad = run(with_gradient(hvd.allgather, weights[rank]), own)
    before = sum(1 + r for r in range(rank))
    mean = sum(weights) / size
    check(grad, mean[before : before + len(own)], f"gradient of allgather {mode}")
    check_alltoall(hvd, run, mode, rank, size)


def check_alltoall(hvd: Any, run: Any, mode: str, rank: int, size: int) -> None:
    """Rank r sends i + 1 rows to rank i, and keeps one row to itself."""
    splits = list(range(1, size + 1))
    given = [rows_of(r, sum(splits) + 1, "float64") for r in range(size)]
    starts = numpy.cumsum([0, *splits])
    expected = numpy.concatenate([each[starts[rank] : starts[rank + 1]] for each in given])
    output, received = run(lambda x: hvd.alltoall(x, splits), given[rank])
    check(output, expected, f"alltoall with splits {mode}")
    assert received.tolist() == [rank + 1] * size, mode
    both = with_gradient(
        lambda x: hvd.alltoall(x, splits)[0], numpy.full(expected.shape, rank + 1.0)
    )
    _, grad = run(both, given[rank])
    factors = [r + 1 for r in range(size) for _ in range(r + 1)] + [0]
    check(grad[:, 0], numpy.asarray(factors, "float64"), f"gradient of alltoall {mode}")


def check_groups(hvd: Any, run: Any, mode: str, rank: int, size: int) -> None:
    first = [rows_of(r, 4, "float32") for r in range(size)]
    second = [rows_of(r, 3, "float64") for r in range(size)]

    def grouped(a: Any, b: Any) -> list[Any]:
        return [
            *hvd.grouped_allreduce([a, b], op=hvd.Sum),
            *hvd.grouped_allgather([a, b]),
            *hvd.grouped_reducescatter([a, b], op=hvd.Sum),
            *hvd.grouped_allreduce([a, b], compression=hvd.Compression.fp16),
        ]

    found = run(grouped, first[rank], second[rank])
    expected = [sum(first), sum(second), numpy.concatenate(first), numpy.concatenate(second)]
    expected += [sum(first)[cut(4, size)[rank]], sum(second)[cut(3, size)[rank]]]
    expected += [sum(first) / numpy.float32(size), sum(second) / size]
    for number, (each, wanted) in enumerate(zip(found, expected, strict=True)):
        check(each, wanted, f"group, result {number} {mode}")
    check_group_gradients(hvd, run, mode, rank, size)


def check_group_gradients(hvd: Any, run: Any, mode: str, rank: int, size: int) -> None:
    import tensorflow as tf

    given = rows_of(rank, 4, "float64")

    def both(x: Any) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            sums = hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)
            rows = hvd.grouped_allgather([x, 3 * x])
            parts = hvd.grouped_reducescatter([x, x], op=hvd.Sum)
            losses = [
                tf.reduce_sum(first) + 5 * tf.reduce_sum(second) * (rank + 1)
                for first, second in (sums, rows, parts)
            ]
        return [tape.gradient(loss, x) for loss in losses]

    total = sum(1 + 10 * (r + 1) for r in range(size))
    found = run(both, given)
    check(found[0], numpy.full(given.shape, float(total)), f"gradient of grouped_allreduce {mode}")
    mean = sum(1 + 15 * (r + 1) for r in range(size)) / size
    check(found[1], numpy.full(given.shape, mean), f"gradient of grouped_allgather {mode}")
    rows = [(1 + 5 * (r + 1)) * size for r in range(size) for _ in range(4)[cut(4, size)[r]]]
    expected = numpy.repeat(numpy.asarray(rows, "float64")[:, None], 3, 1)
    check(found[2], expected, f"gradient of grouped_reducescatter {mode}")


def check_places(hvd: Any, run: Any, mode: str, rank: int, size: int) -> None:
    def places() -> list[Any]:
        return [
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(name="local"),
            hvd.process_set_included_op(),
        ]

    assert [int(each) for each in run(places)] == [rank, size, rank, size, 1], mode


def test_collectives_of_two_ranks_are_those_of_numpy(ranks: Ranks) -> None:
    ranks(2, collect, timeout=170)


def check_wrapping(is_wrapped: bool) -> None:
    """Sessions change with hvd.init(), not with an import."""
    from tensorflow.python.client.session import BaseSession

    import allstep.tensorflow  # noqa: F401

    assert hasattr(BaseSession.__init__, "_allstep") == is_wrapped


def slices() -> None:
    check_wrapping(False)
    tf, hvd, rank, size = start()
    check_wrapping(True)

    def sparse(values: Any) -> list[Any]:
        given = tf.IndexedSlices(values, tf.constant([rank, 3]), tf.constant([5, 3]))
        mean = hvd.allreduce(given)
        dense, total = hvd.grouped_allreduce([values, given], op=hvd.Sum)
        return [mean.values, mean.indices, tf.convert_to_tensor(total), dense]

    given = [rows_of(r, 2, "float32") for r in range(size)]
    for mode, run in modes():
        values, indices, total, dense = run(sparse, given[rank])
        check(values, numpy.concatenate(given) / numpy.float32(size), mode)
        assert indices.tolist() == [0, 3, 1, 3], mode
        expected = numpy.zeros((5, 3), "float32")
        for r in range(size):
            expected[r] += given[r][0]
            expected[3] += given[r][1]
        check(total, expected, mode)
        check(dense, sum(given), mode)
    slice_ = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([0]))
    for options in ({"op": hvd.Min}, {"prescale_factor": 2.0}, {"op": hvd.Adasum}):
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            hvd.allreduce(slice_, **options)
    unknown = hvd.ProcessSet([0])
    unknown.process_set_id = 10
    with pytest.raises(ValueError, match="process set 10 does not exist"):
        hvd.allreduce(tf.ones(1), process_set=unknown)
    check_sessions(tf, hvd, rank)
    check_names(tf, hvd, rank)
    check_no_writes(tf, hvd, rank)
    stop(hvd)


def check_sessions(tf: Any, hvd: Any, rank: int) -> None:
    """40 independent operations in one run, 20 times; also where the user asks for one thread."""
    for config in (None, tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1)):
        with tf.Graph().as_default():
            given = [tf.fill([3], float(number + rank)) for number in range(40)]
            sums = [hvd.allreduce(each, op=hvd.Sum) for each in given]
            with tf.compat.v1.Session(config=config) as session:
                for _ in range(20):
                    found = session.run(sums)
        assert [each[0] for each in found] == [2 * number + 1 for number in range(40)]


def check_names(tf: Any, hvd: Any, rank: int) -> None:
    """Operations of a graph match by the name of their node, whatever the order on a rank."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        names = ["b", "a"] if rank else ["a", "b"]
        found = {
            name: hvd.allreduce(tf.constant(float(ord(name))), name=name, op=hvd.Sum)
            for name in names
        }
        assert session.run(found) == {"a": 2.0 * ord("a"), "b": 2.0 * ord("b")}
        assert found["a"].op.inputs[0].op.name.startswith("a")
        with tf.name_scope(f"only_on_{rank}"):
            inside = hvd.allreduce(tf.constant(1.0), name="c", ignore_name_scope=True, op=hvd.Sum)
        assert session.run(inside) == 2.0


def check_no_writes(tf: Any, hvd: Any, rank: int) -> None:
    """A gradient that is a variable's own memory is only read."""
    variable = tf.Variable(numpy.full(1000, float(rank + 1)))
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * variable / 2)
        (grad,) = hvd.DistributedGradientTape(tape).gradient(loss, [variable])
        total = hvd.allreduce(variable, op=hvd.Sum)
        assert variable.numpy().tolist() == [rank + 1.0] * 1000
        assert grad.numpy().tolist() == [1.5] * 1000
        assert total.numpy().tolist() == [3.0] * 1000


def test_indexed_slices_sessions_names_and_memory(ranks: Ranks) -> None:
    ranks(2, slices, timeout=120)
