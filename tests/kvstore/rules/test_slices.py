"""Slices: together they are the value, and those of a matrix are whole rows."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from allstep.kvstore.rules.slices import SLICE_BYTES, cut


# No rows, each longer than a slice.
@example(0, 5, 16)
@given(st.integers(0, 300), st.integers(1, 90), st.integers(16, 200))
def test_slices_are_the_value_in_whole_rows(num_rows: int, width: int, nbytes: int) -> None:
    numel = num_rows * width
    spans = cut(numel, 4, nbytes, width)
    assert spans[0][0] == 0 and spans[-1][1] == numel
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    for start, end in spans:
        assert (end - start) * 4 <= max(nbytes, numel * 4 // 128)
        is_whole = start % width == end % width == 0
        assert is_whole or start // width == (end - 1) // width
    assert [span for span in spans if span[0] == span[1]] == ([] if numel else [(0, 0)])


def test_long_rows_have_equal_parts() -> None:
    assert cut(30, 4, 28, 10) == [(at, at + 5) for at in range(0, 30, 5)]


def test_a_vector_is_cut_anywhere_and_a_large_matrix_into_few_slices() -> None:
    assert cut(600_000, 4) == [(0, 262_144), (262_144, 524_288), (524_288, 600_000)]
    assert len(cut(64_000_000, 4, width=64)) == 129
    assert len(cut(64_000_000, 4)) == 64_000_000 * 4 // SLICE_BYTES + 1
