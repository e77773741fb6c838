"""Requests as bytes, their names, and what is refused at once."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.engine import Kind, Op, Request
from allstep.engine.request import check, decode, encode, full_names
from allstep.errors import CommError

factors = st.floats(allow_nan=False)


@given(
    st.sampled_from(Kind),
    st.text(),
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from(Op),
    factors,
    factors,
    st.lists(st.integers(0, 9)),
)
def test_a_request_comes_out_as_it_went_in(
    kind: Kind,
    name: str,
    shape: list[int],
    op: Op,
    prescale: float,
    postscale: float,
    splits: list[int],
) -> None:
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    request = Request(kind, "", tensor, None, op, prescale, postscale, 3, tuple(splits), 7)
    data = encode(request, name)
    ask = decode(data)
    assert (ask.kind, ask.name, ask.shape, ask.op) == (kind, name, tuple(shape), op)
    assert (ask.prescale, ask.postscale, ask.root, ask.splits) == (
        prescale,
        postscale,
        3,
        tuple(splits),
    )
    assert (ask.process_set, ask.dtype, ask.device, ask.key) == (7, "bfloat16", "cpu", (7, name))
    assert ask.nbytes == tensor.numel() * 2
    assert decode(bytes(bytearray(data))) is ask


def test_names() -> None:
    def named(kind: Kind, *names: str) -> list[str]:
        return full_names([Request(kind, name) for name in names], 5)

    assert named(Kind.ALLREDUCE, "allreduce.x") == ["allreduce.x"]
    assert named(Kind.ALLREDUCE, "") == ["allreduce.noname.5"]
    assert named(Kind.ADASUM, "") == ["allreduce.noname.5"]
    assert named(Kind.REDUCESCATTER, "") == ["reducescatter.noname.5"]
    assert named(Kind.BARRIER, "") == ["barrier.noname"]
    assert named(Kind.JOIN, "") == ["join.noname"]
    assert named(Kind.ALLGATHER, "", "") == [
        "grouped_allgather.noname.5_1of2",
        "grouped_allgather.noname.5_2of2",
    ]


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        (Kind.ALLREDUCE, {"tensor": None}, "needs a dense tensor, found no tensor"),
        (Kind.ALLREDUCE, {"tensor": torch.zeros(2).to_sparse()}, "layout torch.sparse_coo"),
        (Kind.BROADCAST, {"root": 1}, r"invalid root rank 1: it must be one of \[0, 2, 3\]"),
        (Kind.REDUCESCATTER, {"tensor": torch.tensor(1.0)}, "does not support scalar"),
        (
            Kind.ALLTOALL,
            {"tensor": torch.zeros(4)},
            "4 rows cannot be divided evenly among 3 ranks",
        ),
        (Kind.ALLTOALL, {"splits": (1, 2)}, "must be 3 numbers"),
        (Kind.ALLTOALL, {"splits": (3, 3, 1)}, "sum of at most 6"),
        (Kind.ALLTOALL, {"splits": (3, -3, 1)}, "numbers from 0"),
        (
            Kind.ALLREDUCE,
            {"tensor": torch.zeros(2, dtype=torch.complex64), "op": Op.MIN},
            "have no order",
        ),
        (Kind.ADASUM, {}, "power of two, not 3"),
        (Kind.ALLREDUCE, {"tensor": torch.zeros(2).to(torch.float8_e5m2)}, "cannot add it"),
        (Kind.ALLREDUCE, {"output": torch.zeros(3)}, r"output has shape \[3\], the input \[6\]"),
    ],
)
def test_what_is_refused_at_once(kind: Kind, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(Request(kind, "x", **{"tensor": torch.zeros(6), **more}), 0, (0, 2, 3))


def test_reducescatter_only_adds() -> None:
    with pytest.raises(CommError, match="only supports AVERAGE and SUM, not MAX"):
        check(Request(Kind.REDUCESCATTER, "x", torch.zeros(3), op=Op.MAX), 0, (0,))
