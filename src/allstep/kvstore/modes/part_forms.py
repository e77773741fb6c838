"""What servers and workers must know of keys and their parts, as text."""

import json

from allstep.kvstore.memory.key_memory import KeyShape, short
from allstep.kvstore.rules.placement import PlacedPart
from allstep.kvstore.rules.row_span import RowSpan
from allstep.kvstore.rules.slices import Span


def part_text(form: KeyShape, part: PlacedPart) -> str:
    """Return what a server must know of a part."""
    shape = _shape_of(form, part.span)
    return json.dumps([form.key, short(form.dtype), shape, part.span[0], form.width])


def _shape_of(form: KeyShape, span: Span) -> list[int]:
    """Return the shape of a part: of its rows, or of single elements if rows are cut."""
    start, end = span
    if span == (0, form.numel):
        return list(form.shape)
    if not form.num_rows:
        return [end - start]
    width = form.width if RowSpan(start, end, form.width).is_aligned else 1
    return [(end - start) // width, width]


def described(form: KeyShape) -> str:
    """Return key, type and shape as text, to compare."""
    return json.dumps([form.key, short(form.dtype), list(form.shape)])
