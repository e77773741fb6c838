"""The rows of a matrix of which a part has elements.

Parts begin and end at rows if these are small (`placement`); the first and the last row of a part
may otherwise be cut, and a row of megabytes is in several parts::

    part   |..34|5555|67|        rows 3 to 6 of a matrix, elements `start` to before `end`

Rows cross a link as their numbers, and the elements that the part has of them, one after the other.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RowSpan(NamedTuple):
    """Elements `start` to before `end` of a matrix with rows of `width` elements."""

    start: int
    end: int
    width: int

    @property
    def is_aligned(self) -> bool:
        """Whether it has no part of a row."""
        return self.start % self.width == 0 and self.end % self.width == 0

    def within(self, numbers: Tensor) -> tuple[int, int]:
        """Return which of these rows, in increasing order, have elements here: first, end."""
        bounds = torch.tensor([self.start // self.width, -(-self.end // self.width)])
        low, high = torch.searchsorted(numbers, bounds).tolist()
        return (low, high) if self.end > self.start else (0, 0)

    def cut(self, numbers: Tensor) -> tuple[int, int]:
        """Return, of the elements of these rows one after the other, the first and the end here.

        numbers: rows that have elements here.
        """
        if not numbers.numel():
            return 0, 0
        before = max(0, self.start - int(numbers[0]) * self.width)
        after = max(0, (int(numbers[-1]) + 1) * self.width - self.end)
        return before, numbers.numel() * self.width - after

    def places(self, numbers: Tensor) -> Tensor:
        """Return the places of the elements of these rows, counted from `start`."""
        first = (numbers * self.width).clamp_min(self.start)
        counts = ((numbers + 1) * self.width).clamp_max(self.end) - first
        ends = counts.cumsum(0)
        shift = (first - self.start) - (ends - counts)
        return torch.arange(int(counts.sum())) + torch.repeat_interleave(shift, counts)
