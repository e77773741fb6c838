"""`trust_ratios()` of a layer-wise optimizer (LARS, LAMB, ...) whose weights are shared: the owners of the layers tell rank 0.

Each rank knows the ratios of the layers that it updates. When somebody asks, they are gathered as text, in two sums: the lengths of all
ranks' texts, then the texts side by side, each rank's in its own place.
"""

import json

import numpy as np
import torch

from allstep.comm.group.process_group import AllstepGroup
from allstep.parallel.shared_weights import SharedWeights
from allstep.torch.optimizer import horovods_errors


class SharedRatios(SharedWeights):
    """What is added to a wrapped class that has `trust_ratios`."""

    def trust_ratios(self) -> dict[str | int, float]:
        """By which factor the last step scaled each layer: {name, or number without names: factor}. Exempt layers have none.

        All ranks call it together; rank 0 gets the ratios of all layers, the others an empty dict.
        """
        own = json.dumps(list(super().trust_ratios().items()))  # type: ignore[misc]  # the wrapped class has it
        group = self._owned.group
        with horovods_errors():
            texts = texts_of_all(group, own)
        return {name: ratio for text in texts for name, ratio in json.loads(text)} if group.rank() == 0 else {}


def texts_of_all(group: AllstepGroup, text: str) -> list[str]:
    """By rank. All ranks call it together."""
    rank, own = group.rank(), np.frombuffer(text.encode(), np.uint8)
    lengths = np.zeros(group.size(), np.int64)
    lengths[rank] = len(own)
    group.allreduce([torch.from_numpy(lengths)]).wait()
    ends = np.cumsum(lengths)
    side_by_side = np.zeros(ends[-1], np.uint8)
    side_by_side[ends[rank] - len(own) : ends[rank]] = own
    group.allreduce([torch.from_numpy(side_by_side)]).wait()
    return [part.tobytes().decode() for part in np.split(side_by_side, ends[:-1])]
