"""Check every sample of a source: its checksum, its label, and that its whole image can be decoded.

A sample is good if a loader would deliver it. Bad samples are listed with file, offset and reason,
in sample order.
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

VerifyProgress = Callable[[int, int, int], None]
"""Called after each chunk: samples checked so far, samples in total, bad samples so far."""


@dataclass(frozen=True)
class Verified:
    """The result of `verify`: how many samples were checked, and the bad ones."""

    num_samples: int
    bad: tuple[BadSample, ...]


def verify(
    source: Source,
    *,
    jobs: int | None = None,
    progress: VerifyProgress | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Verified:
    """Read and decode all samples of `source` with `jobs` threads (default: one per core).

    Images of more than `max_pixels` are bad, and are not decoded.
    """
    bad: list[BadSample] = []

    def check(chunk: tuple[int, int]) -> tuple[int, list[BadSample]]:
        problems = (find_problem(source, number, max_pixels) for number in range(*chunk))
        return chunk[1], [problem for problem in problems if problem]

    with closing(ordered(check, chunks(len(source), _CHUNK), jobs or default_jobs())) as checked:
        for count, found in checked:
            bad += found
            if progress:
                progress(count, len(source), len(bad))
    return Verified(len(source), tuple(bad))


def find_problem(source: Source, number: int, max_pixels: int = MAX_PIXELS) -> BadSample | None:
    """Return why sample `number` is bad; None if it is good."""
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
    """Return whether `data` is an encoded image, rather than pixels or other numbers."""
    return not isinstance(data, np.ndarray) or data.ndim == 1
