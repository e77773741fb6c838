"""Who updates what: every element once."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.parallel.exchange.owner_ranges import (
    ALIGNED,
    ParameterRange,
    by_elements,
    by_whole_parameters,
)

sizes = st.lists(st.integers(0, 5000), max_size=12)
owners = st.integers(1, 6)


@pytest.mark.parametrize("deal", [by_elements, by_whole_parameters])
@given(sizes, owners)
def test_every_element_has_one_owner(
    deal: Callable[[list[int], int], list[list[ParameterRange]]], sizes: list[int], num_owners: int
) -> None:
    owned = deal(sizes, num_owners)
    assert len(owned) == num_owners
    ranges = sorted(span for share in owned for span in share)
    for number, size in enumerate(sizes):
        mine = [span for span in ranges if span.number == number]
        bounds = [0, *(span.end for span in mine)]
        assert [span.start for span in mine] == bounds[:-1]
        assert bounds[-1] == size
        assert all(span.end > span.start for span in mine)


@given(sizes, owners)
def test_shares_are_equal_but_for_alignment(sizes: list[int], num_owners: int) -> None:
    counts = [
        sum(end - start for _, start, end in share) for share in by_elements(sizes, num_owners)
    ]
    assert max(counts) - min(counts) <= 2 * ALIGNED


@given(sizes, owners)
def test_whole_parameters_stay_whole(sizes: list[int], num_owners: int) -> None:
    owned = by_whole_parameters(sizes, num_owners)
    assert all(
        (span.start, span.end) == (0, sizes[span.number]) for share in owned for span in share
    )
    counts = [sum(sizes[span.number] for span in share) for share in owned]
    assert max(counts) <= sum(sizes) / num_owners + max(sizes, default=0)
