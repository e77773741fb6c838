"""Rows on the links: the rows of a gradient, or of a value, in requests for the parts of a key.

A push of rows visits all parts of the key, with a message without payload for parts that have none
of them: what the optimizer keeps once (Adam's step count), the rounds of mode sync and the ages of
mode stale count the pushes of the key, on every part alike.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from allstep.kvstore.links.all_links import Request
from allstep.kvstore.links.pair import as_bytes
from allstep.kvstore.memory.key_memory import StoredKey
from allstep.kvstore.rules.headers import Header, Kind
from allstep.kvstore.rules.placement import PlacedPart
from allstep.kvstore.rules.row_span import RowSpan
from allstep.kvstore.updates.row_updates import Rows

Parts = Sequence[PlacedPart]


def push_rows(stored: StoredKey, parts: Parts, rows: Rows) -> list[Request]:
    """Return the requests that push rows of a gradient."""
    flat = rows.values.reshape(-1)
    found = []
    for part, numbers, start, end in _cut(stored, parts, rows.numbers):
        header = Header(Kind.PUSH_ROWS, part.number, a=numbers.numel())
        payload = partial(_joined, numbers, flat[start:end]) if numbers.numel() else None
        found.append(Request(part.server, header, payload))
    return found


def _joined(numbers: Tensor, values: Tensor) -> Tensor:
    return torch.cat([as_bytes(numbers), as_bytes(values)])


def pull_rows(
    stored: StoredKey,
    parts: Parts,
    numbers: Tensor,
    out: Tensor,
    *,
    number: int = 0,
    visits_all: bool = False,
) -> list[Request]:
    """Return the requests that pull rows to `out`, flat: the rows one after the other.

    number: of the round that the value must contain. visits_all: also parts without these rows.
    """
    found = []
    for part, own, start, end in _cut(stored, parts, numbers):
        if not (own.numel() or visits_all):
            continue
        room = as_bytes(out[start:end])
        header = Header(Kind.PULL_ROWS, part.number, a=number, b=room.numel())
        found.append(Request(part.server, header, as_bytes(own), room))
    return found


def _cut(
    stored: StoredKey, parts: Parts, numbers: Tensor
) -> Iterator[tuple[PlacedPart, Tensor, int, int]]:
    """Yield each part, its rows, and which elements of all rows it has."""
    width = max(1, stored.form.width)
    for part in parts:
        span = RowSpan(*part.span, width)
        low, high = span.within(numbers)
        own = numbers[low:high]
        start, end = span.cut(own)
        yield part, own, low * width + start, low * width + end
