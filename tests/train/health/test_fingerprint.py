"""Equal weights: the hash against a slow one in Python's unbounded integers; over ranks, against
what the test has changed where.
"""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import allstep
from allstep.errors import AllstepError
from allstep.train.health.replicas import Fingerprint, hash_of, tensors_of
from conftest import SOAK
from support.ranks import Ranks

MASK = (1 << 64) - 1


def slow_hash(octets: bytes) -> int:
    """Return the hash as the docstring of the module defines it, modulo 2^64."""
    draw = random.Random(8)
    whole = len(octets) // 8 * 8
    numbers = [int.from_bytes(octets[i : i + 8], "little") for i in range(0, whole, 8)] + list(
        octets[whole:]
    )
    while True:
        weights = [draw.getrandbits(63) | 1 for _ in range(1024)]
        rows = [numbers[i : i + 1024] for i in range(0, len(numbers) // 1024 * 1024 + 1, 1024)]
        sums = [sum(x * w for x, w in zip(row, weights, strict=False)) & MASK for row in rows]
        numbers = [y ^ ((y >> 32) | (0xFFFFFFFF00000000 if y >> 63 else 0)) for y in sums]
        if len(numbers) == 1:
            return numbers[0] | 1


def number(tensor: torch.Tensor) -> int:
    return hash_of(tensor).item() & MASK


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("count", [0, 1, 7, 2048, 5000])
def test_it_is_what_its_docstring_defines(dtype: torch.dtype, count: int) -> None:
    tensor = (torch.randn(count, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    assert number(tensor) == slow_hash(tensor.view(torch.uint8).numpy().tobytes() if count else b"")


def test_two_folds() -> None:
    tensor = torch.arange(1024 * 1024 + 3)
    assert number(tensor) == slow_hash(tensor.numpy().tobytes())


def test_memory_counts_not_how_it_is_looked_at() -> None:
    tensor = torch.randn(6, 4, 3, 5)
    last = tensor.to(memory_format=torch.channels_last)
    assert number(last) == number(tensor.permute(0, 2, 3, 1).contiguous())
    inside = torch.cat([torch.zeros(1), tensor.flatten()])[1:].view_as(
        tensor
    )  # not where a 64-bit number may begin
    assert number(inside) == number(tensor)
    assert number(tensor.expand(2, 6, 4, 3, 5)) == number(tensor.repeat(2, 1, 1, 1, 1))


def test_nans_with_equal_bits_are_equal() -> None:
    one = torch.full((100,), float("nan"))
    other = one.clone()
    assert number(one) == number(other)
    other.view(torch.int32)[3] += 1
    assert other.isnan().all()
    assert number(one) != number(other)


@settings(max_examples=1000 if SOAK else 40)
@given(st.data())
def test_changed_bits_show(data: st.DataObject) -> None:
    """Flip one or two bits anywhere, also where a plain sum would be the same."""
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    changed = tensor.clone()
    places = st.tuples(st.integers(0, 2999), st.sampled_from([1, 2, 1 << 10, 1 << 22]))
    one, two = data.draw(st.tuples(places, places).filter(lambda pair: pair[0][0] != pair[1][0]))
    changed.view(torch.int32)[one[0]] += one[1]
    assert number(changed) != number(tensor)
    changed.view(torch.int32)[two[0]] -= two[1]
    assert number(changed) != number(tensor)


def test_names_in_the_order_of_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[3].weight = model[2].weight
    assert [name for name, _ in tensors_of(model)] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
        "2.weight", "2.bias", "3.bias",
    ]  # fmt: skip


def compare(changes: dict[int, list[str]], shared: bool) -> str:
    """Return the error after changing the named tensors on some ranks, differently on each."""
    world = allstep.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    fingerprint = Fingerprint(model, world, shared)
    fingerprint.start(1)
    fingerprint.finish()
    fingerprint.finish()  # nothing is under way
    tensors: dict[str, Any] = dict(tensors_of(model))
    with torch.no_grad():
        for name in changes.get(world.rank, []):
            tensors[name] += 1 + world.rank
    fingerprint.start(7)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()  # the next update: what was at step 7 counts
    total = torch.ones(3)
    torch.distributed.all_reduce(total)  # an operation of the next step comes between
    assert total[0] == world.size
    try:
        fingerprint.start(8)
    except AllstepError as error:
        return str(error)
    fingerprint.finish()
    return ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        (
            {2: ["2.bias", "1.running_var"]},
            "the first of 2 tensors (of 9) that differ is the buffer '1.running_var', on rank 2.",
        ),
        (
            {0: ["0.weight"]},
            "the first of 1 tensors (of 9) that differ is the parameter '0.weight', on rank 0.",
        ),
        (
            {0: ["1.bias"], 1: ["1.bias"]},
            "is the parameter '1.bias', on ranks 1, 2.",
        ),  # all three differ: rank 0 counts as right
        ({1: ["1.num_batches_tracked"]}, "is the buffer '1.num_batches_tracked', on rank 1."),
    ],
)
def test_ranks_that_differ(
    ranks: Ranks, changes: dict[int, list[str]], message: str | None
) -> None:
    messages = ranks(3, compare, changes, False)
    assert len(set(messages)) == 1
    assert (
        (message in messages[0] and "after step 7" in messages[0]) if message else not messages[0]
    )


def test_two_ranks_are_a_tie_and_rank_0_counts_as_right(ranks: Ranks) -> None:
    assert (
        "is the parameter '2.weight', on rank 1." in ranks(2, compare, {0: ["2.weight"]}, False)[0]
    )


def test_with_shared_weights_one_rank_of_a_host_looks(ranks: Ranks) -> None:
    """Each rank has a copy of its own here, so that the test can see which rank hashes."""
    hosts = ["a", "a", "b"]
    parameter_of_rank_1 = ranks(3, compare, {1: ["0.weight"]}, True, hosts=hosts)
    assert parameter_of_rank_1 == ["", "", ""]
    buffer_of_rank_1 = ranks(3, compare, {1: ["1.running_mean"]}, True, hosts=hosts)
    assert (
        "is the buffer '1.running_mean', on rank 1. Buffers that a training step changes become"
        in buffer_of_rank_1[0]
    )
    parameter_of_rank_2 = ranks(3, compare, {2: ["0.weight"]}, True, hosts=hosts)
    assert "is the parameter '0.weight', on rank 2." in parameter_of_rank_2[0]
