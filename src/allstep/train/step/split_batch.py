"""Cut a share into micro-batches."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from allstep.data import Batch


def split(batch: Batch, count: int) -> Iterator[Batch]:
    """Yield `count` parts of a batch, of nearly equal size; parts of a small batch may be empty."""
    if count == 1:
        yield batch
        return
    targets = batch.target.tensor_split(count)
    samples = np.array_split(batch.samples, count)
    fields = {name: _split(values, samples) for name, values in batch.fields.items()}
    for number, data in enumerate(batch.data.tensor_split(count)):
        yield replace(
            batch,
            data=data,
            target=targets[number],
            samples=samples[number],
            weight=len(data),
            fields={name: parts[number] for name, parts in fields.items()},
        )


def _split(values: Any, like: list[Any]) -> list[Any]:
    """Return slices of an array or a list, as long as those of `like`."""
    ends = np.cumsum([len(each) for each in like]).tolist()
    return [values[end - len(each) : end] for end, each in zip(ends, like, strict=True)]
