"""`trust_ratios()` of a layer-wise optimizer (LARS, LAMB, ...) whose weights are shared: the owners
of the layers send theirs to rank 0.

Each rank knows the ratios of the layers that it updates. A call gathers them as text, in two sums:
the lengths of all ranks' texts, then the concatenated texts, each rank's at its own offset.
"""

import json

import numpy as np
import torch

from allstep.comm.group.process_group import AllstepGroup


def ratios_of_all(group: AllstepGroup, own: dict[str | int, float]) -> dict[str | int, float]:
    """Return the ratios of all layers on rank 0, an empty dict on the others.

    All ranks call it together. `own`: the ratios of the layers that this rank updates.
    """
    texts = texts_of_all(group, json.dumps(list(own.items())))
    return (
        {name: ratio for text in texts for name, ratio in json.loads(text)}
        if group.rank() == 0
        else {}
    )


def texts_of_all(group: AllstepGroup, text: str) -> list[str]:
    """Return the texts of all ranks, by rank. All ranks call it together."""
    rank, own = group.rank(), np.frombuffer(text.encode(), np.uint8)
    lengths = np.zeros(group.size(), np.int64)
    lengths[rank] = len(own)
    group.allreduce([torch.from_numpy(lengths)]).wait()
    ends = np.cumsum(lengths)
    side_by_side = np.zeros(ends[-1], np.uint8)
    side_by_side[ends[rank] - len(own) : ends[rank]] = own
    group.allreduce([torch.from_numpy(side_by_side)]).wait()
    return [part.tobytes().decode() for part in np.split(side_by_side, ends[:-1])]
