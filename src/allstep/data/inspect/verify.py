"""Checks every sample of a source: its checksum, its label, and that its image can be decoded,
all of it.

A sample is good when a loader would deliver it. Bad ones are listed with file, offset and reason,
in the order of the samples.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from allstep.data.image.decode import decode
from allstep.data.image.limit import MAX_PIXELS
from allstep.data.packing.ordered import chunks, default_jobs, ordered
from allstep.data.sources.source import BadSample, Source

_CHUNK = 32

Told = Callable[[int, int, int], None]
"""Told, as checking goes on: samples so far, of how many, bad ones so far."""


@dataclass(frozen=True)
class Verified:
    """What was found."""

    num_samples: int
    bad: tuple[BadSample, ...]


def verify(
    source: Source,
    *,
    jobs: int | None = None,
    progress: Told | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Verified:
    """Reads and decodes all samples of `source` with `jobs` threads (one for each core, unless
    given).

    Images of more than `max_pixels` are bad, and not decoded.
    """
    bad: list[BadSample] = []

    def check(piece: tuple[int, int]) -> tuple[int, list[BadSample]]:
        found = [
            problem
            for number in range(*piece)
            if (problem := what_is_wrong(source, number, max_pixels))
        ]
        return piece[1], found

    with closing(ordered(check, chunks(len(source), _CHUNK), jobs or default_jobs())) as checked:
        for count, found in checked:
            bad += found
            if progress:
                progress(count, len(source), len(bad))
    return Verified(len(source), tuple(bad))


def what_is_wrong(source: Source, number: int, max_pixels: int = MAX_PIXELS) -> BadSample | None:
    """Why sample `number` is bad; None when it is good."""
    try:
        data = source.read(number).data
        if is_encoded(data):
            decode(data, max_pixels=max_pixels)
        return None
    except BadSample as error:
        return error
    except ValueError as error:
        return BadSample(number, source.place(number), str(error))


def is_encoded(data: Any) -> bool:
    """Whether `data` is an image's file rather than its pixels or other numbers."""
    return not isinstance(data, np.ndarray) or data.ndim == 1
