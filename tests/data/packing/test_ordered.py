"""`ordered` returns the results of threads in the order of the items."""

import threading
from contextlib import closing

import pytest

from allstep.data.packing.ordered import chunks, ordered


@pytest.mark.parametrize("jobs", [1, 3])
def test_results_in_the_order_of_the_items(jobs: int) -> None:
    assert list(ordered(lambda x: x * x, range(100), jobs)) == [x * x for x in range(100)]


def test_no_more_than_ahead_items_are_started() -> None:
    begun: list[int] = []
    with closing(ordered(lambda x: begun.append(x), range(1000), 2, ahead=5)) as results:
        for taken, _ in enumerate(results):
            assert len(begun) <= taken + 5
            if taken == 20:
                break
    assert len(begun) < 30


def test_an_error_is_raised_and_no_thread_remains() -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        list(ordered(lambda x: 1 // (5 - x), range(100), 2))
    assert threading.active_count() == before


def test_chunks() -> None:
    assert list(chunks(7, 3)) == [(0, 3), (3, 6), (6, 7)]
    assert list(chunks(0, 3)) == []
