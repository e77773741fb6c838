"""Weights that ranks of a host share, and gradients that go to their owners."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from allstep.errors import UserError
from allstep.parallel.exchange import Named, Rule
from allstep.parallel.exchange.owner_ranges import ParameterRange
from allstep.parallel.exchange.owner_sums import filled
from allstep.parallel.exchange.owners import Owners
from allstep.parallel.updates.shared_parameters import SharedParameters
from support.default_group import joined
from support.ranks import Ranks

WAYS = {"aa": 2, "aaa": 3, "ab": 2, "aabb": 4, "aaabb": 5}


@given(st.lists(st.integers(1, 300), max_size=10), st.integers(1, 100))
def test_blocks_hold_every_element_once(sizes: list[int], numel: int) -> None:
    blocks = filled([ParameterRange(number, 0, size) for number, size in enumerate(sizes)], numel)
    seen = [
        (part.number, element)
        for block in blocks
        for part in block
        for element in range(part.start, part.end)
    ]
    assert seen == [
        (number, element) for number, size in enumerate(sizes) for element in range(size)
    ]
    for block in blocks:
        places = [(part.at, part.at + part.end - part.start) for part in block]
        assert all(0 <= start < end <= numel for start, end in places)
        assert all(before[1] <= after[0] for before, after in pairwise(places))
    assert all(sum(part.end - part.start for part in block) == numel for block in blocks[:-1])


def model(seed: int) -> list[Named]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Linear(40, 300), nn.Linear(300, 1000), nn.Linear(7, 1)
    )
    model[0].to(memory_format=torch.channels_last)
    model[3].double()
    return [Named(name, parameter) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("places", WAYS)
def test_owners_have_the_mean_of_what_they_own(ranks: Ranks, places: str, whole: bool) -> None:
    def work() -> None:
        with joined() as (rank, size):
            group = dist.distributed_c10d._get_default_group()
            named = model(rank)
            owned = Owners(group, "test", named, Rule(), whole)
            SharedParameters(owned)
            first = group.local.layout.neighbours[0]
            for (name, parameter), (_, expected) in zip(named, model(first), strict=True):
                assert torch.equal(parameter, expected), (
                    name
                )  # the weights of the host's first rank
                assert parameter.stride() == expected.stride()
                assert (
                    parameter.untyped_storage().nbytes()
                    == parameter.numel() * parameter.element_size()
                )
            for step in range(3):
                weights = [1.0 + r for r in range(size)] if step == 2 else [1.0] * size
                gradients = [
                    [
                        torch.randn(
                            p.shape,
                            dtype=p.dtype,
                            generator=torch.Generator().manual_seed(100 * r + step),
                        )
                        for _, p in named
                    ]
                    for r in range(size)
                ]
                for number, (_, parameter) in enumerate(named):
                    parameter.grad = (
                        None
                        if number == 1 or (number == 4 and rank)
                        else gradients[rank][number].clone()
                    )
                assert owned.reduce(weights[rank] if step == 2 else None) == []
                assert owned.used == {0, 2, 3, 4, 5, 6, 7}
                for number, start, end in owned.own_ranges:
                    if number == 1:
                        continue
                    users = range(1 if number == 4 else size)
                    mean = sum(gradients[r][number].double() * weights[r] for r in users) / sum(
                        weights
                    )
                    laid = torch.empty_like(named[number].parameter, dtype=torch.float64).copy_(
                        mean
                    )
                    found = named[number].parameter.grad.as_strided((mean.numel(),), (1,))[
                        start:end
                    ]
                    torch.testing.assert_close(
                        found.double(),
                        laid.as_strided((mean.numel(),), (1,))[start:end],
                        rtol=1e-5,
                        atol=1e-6,
                    )

    ranks(len(places), work, hosts=list(places), timeout=150)


def test_one_rank_writes_and_all_read(ranks: Ranks) -> None:
    def work() -> None:
        with joined() as (rank, _):
            named = model(0)
            owned = Owners(
                dist.distributed_c10d._get_default_group(), "test", named, Rule(), whole=False
            )
            shared = SharedParameters(owned)
            weight = named[2].parameter
            version = weight._version
            if rank == 1:
                with torch.no_grad():
                    weight.fill_(3.0)
            owned.meet()
            assert (weight == 3.0).all()
            shared.bump_versions()
            assert weight._version > version
            owned.meet()  # all have looked
            # Replaced by the same shape: back into the shared memory, with the new values. By
            # another shape: an error.
            weight.data = torch.full_like(weight, 5.0)
            shared.put_back()
            owned.meet()
            assert (weight == 5.0).all()
            assert weight.data_ptr() == shared.flats[2].data_ptr()
            weight.data = weight.data.double()
            with pytest.raises(UserError, match=r"'1\.weight' was torch\.float32"):
                shared.put_back()

    ranks(2, work)
