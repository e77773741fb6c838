"""Rows that are cut by parts: every element once, at its place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.kvstore.rules.row_span import RowSpan


@given(st.integers(1, 9), st.integers(0, 12), st.data())
def test_every_element_of_the_rows_is_in_one_part(
    width: int, num_rows: int, data: st.DataObject
) -> None:
    matrix = torch.arange(num_rows * width).view(num_rows, width)
    chosen = sorted(data.draw(st.sets(st.integers(0, max(0, num_rows - 1))))) if num_rows else []
    numbers = torch.tensor(chosen, dtype=torch.int64)
    ends = [*sorted(data.draw(st.sets(st.integers(0, num_rows * width)))), num_rows * width]
    found, start = [], 0
    flat, at = matrix[numbers].view(-1), 0
    for end in ends:
        span = RowSpan(start, end, width)
        low, high = span.within(numbers)
        own = numbers[low:high]
        first, last = span.cut(own)
        elements = flat[low * width + first : low * width + last]
        part = matrix.view(-1)[start:end]
        assert torch.equal(part[span.places(own)], elements)
        if span.is_aligned and own.numel():
            rows = part.view(-1, width)[own - start // width]
            assert torch.equal(rows.view(-1), elements)
        found.append(elements)
        at, start = at + elements.numel(), end
    assert torch.equal(torch.cat(found), flat)
