"""Read one sample while faults are active: `corrupt` damages the bytes of its record.

A source with checksums passes the stored bytes through `Injector.changed` before it compares them.
For any other source the stored content that it returns is damaged here.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from allstep.data.sources.source import Sample, Source
from allstep.faults.injector import Injector


def read_record(source: Source, number: int, injector: Injector) -> Sample:
    """Return sample `number`, damaged if a fault is due; raises what the source raises."""
    with injector.reading(number):
        sample = source.read(number)
        content = sample.data.tobytes() if isinstance(sample.data, np.ndarray) else sample.data
        damaged = injector.changed(content)
    return sample if damaged is None else replace(sample, data=_like(sample.data, damaged))


def _like(data: Any, content: bytes) -> Any:
    """Return `content` in the form of `data`: an array, or bytes."""
    if isinstance(data, np.ndarray):
        return np.frombuffer(content, data.dtype).reshape(data.shape)
    return content
