"""The header, one small sum: what the ranks must know about a bucket before its gradients.

```
| a flag for each parameter | present | weighted | samples | own | mean | flags of the exchange |
```

A flag is 0 for no gradient, 1 for a dense one and 2^20 for a sparse one: sums of up to a million
ranks stay distinguishable. The other numbers count ranks: `present` those that participate (and
have not joined), `weighted` those that gave a number of samples, `own` and `mean` those that want
norms measured; `samples` is the sum of all samples. A rank that has joined sends zeros, and learns
from the sums what the other ranks do. An exchange may add flags of its own, always as many; those
of ranks that have joined count, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from allstep.comm.op.gradient_norms import Wanted
from allstep.errors import CollectiveMismatch

_SPARSE = float(1 << 20)
_COUNTS = 5


class Header(NamedTuple):
    """The sums of all ranks' headers for a bucket.

    `dense`, `sparse`: for each parameter, whether some rank has such a gradient. `present`: number
    of ranks that participate. `samples`: of all ranks; None if no rank gave a number. `more`: the
    sums of the exchange's own flags.
    """

    dense: list[bool]
    sparse: list[bool]
    present: int
    samples: float | None
    wanted: Wanted
    more: list[float]


def own_header(
    gradients: Sequence[Tensor | None],
    weight: float | None,
    wanted: Wanted,
    more: Sequence[float] = (),
) -> npt.NDArray[np.float64]:
    """Return the header of this rank.

    `gradients`: of the bucket's parameters. `weight`: the number of samples behind them, if given.
    `more`: flags of the exchange.
    """
    flags = [0.0 if each is None else _SPARSE if each.is_sparse else 1.0 for each in gradients]
    counts = [
        1.0,
        0.0 if weight is None else 1.0,
        float(weight or 0.0),
        float(wanted.own),
        float(wanted.mean),
    ]
    # numpy, since torch.tensor takes more than twice as long for a list.
    return np.array([*flags, *counts, *more])


def absent_header(count: int, more: Sequence[float] = ()) -> npt.NDArray[np.float64]:
    """Return the header of a rank that has joined, for `count` parameters."""
    return np.array([*[0.0] * (count + _COUNTS), *more])


def header_of(summed: npt.NDArray[np.float64], count: int, rank: int) -> Header:
    """Return the sums as a Header; raise CollectiveMismatch if the ranks differ in their wishes.

    `count`: the number of parameters.
    """
    sums = summed.tolist()
    flags, more = sums[:count], sums[count + _COUNTS :]
    present, weighted, samples, own, mean = sums[count : count + _COUNTS]
    _check(
        "set the number of samples behind their gradients (weight): set it", weighted, present, rank
    )
    _check("want the norms of their own gradients (measure_norms): set it", own, present, rank)
    _check(
        "want the norm of the mean gradient (measure_norms or clip_norm): set it",
        mean,
        present,
        rank,
    )
    sparse = [flag >= _SPARSE for flag in flags]
    dense = [bool(flag) and not is_sparse for flag, is_sparse in zip(flags, sparse, strict=True)]
    wanted = Wanted(bool(own), bool(mean))
    return Header(dense, sparse, int(present), samples if weighted else None, wanted, more)


def _check(what: str, count: float, present: float, rank: int) -> None:
    if count and count != present:
        message = f"{count:.0f} of {present:.0f} ranks {what} on all or on none"
        raise CollectiveMismatch(message, rank=rank, op="gradients")
