"""What the ranks tell each other of a bucket of gradients before it travels: one small sum.

```
| a flag for each parameter | present | told | samples | own | mean |
```

A flag is 0 for no gradient, 1 for a dense one and 2^20 for a sparse one: sums of up to a million
ranks stay apart. The rest counts ranks: those that take part (and have not joined), those that told
their samples, those that want norms measured; and adds up the samples. A rank that has joined sends
zeros, and learns from the sums what the others do.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from allstep.comm.op.norms import Wanted
from allstep.errors import CollectiveMismatch

_SPARSE = float(1 << 20)
_COUNTS = 5


class Header(NamedTuple):
    """What all ranks together say of a bucket."""

    dense: list[bool]  # by parameter: whether some rank has a gradient
    sparse: list[bool]
    present: int  # ranks that take part
    samples: float | None  # of all ranks; None when nobody told
    wanted: Wanted


def words_of(
    gradients: Sequence[Tensor | None], weight: float | None, wanted: Wanted
) -> npt.NDArray[np.float64]:
    """Our words. gradients: those of the bucket's parameters. weight: the samples behind them, if
    told."""
    flags = [0.0 if each is None else _SPARSE if each.is_sparse else 1.0 for each in gradients]
    counts = [
        1.0,
        0.0 if weight is None else 1.0,
        float(weight or 0.0),
        float(wanted.own),
        float(wanted.mean),
    ]
    return np.array([*flags, *counts])  # torch.tensor takes more than twice as long for a list


def absent_words(count: int) -> npt.NDArray[np.float64]:
    """The words of a rank that has joined, for so many parameters."""
    return np.zeros(count + _COUNTS)


def header_of(summed: npt.NDArray[np.float64], rank: int) -> Header:
    """The words of all ranks, added up."""
    *flags, present, told, samples, own, mean = summed.tolist()
    _check("told how many samples are behind their gradients: tell it", told, present, rank)
    _check("want the norms of their own gradients (measure_norms): set it", own, present, rank)
    _check(
        "want the norm of the mean gradient (measure_norms or clip_norm): set it",
        mean,
        present,
        rank,
    )
    sparse = [flag >= _SPARSE for flag in flags]
    dense = [bool(flag) and not is_sparse for flag, is_sparse in zip(flags, sparse, strict=True)]
    return Header(
        dense, sparse, int(present), samples if told else None, Wanted(bool(own), bool(mean))
    )


def _check(words: str, count: float, present: float, rank: int) -> None:
    if count and count != present:
        message = f"{count:.0f} of {present:.0f} ranks {words} on all or on none"
        raise CollectiveMismatch(message, rank=rank, op="gradients")
