"""Published updates to a goal by batch, for comparison with ours.

Only the shapes of the curves compare: these have other models, other goals and far more tuning. The
points are updates to a validation error, the best of 100 tuned trials for each batch, with Nesterov
momentum:
Shallue et al. 2018 (arXiv 1811.03600), read off the figures of the authors' notebook to 5 to 8%.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Published updates by batch, and their source."""

    points: Mapping[int, int]
    source: str

    def ratio(self, before: int, after: int) -> float | None:
        """Return the updates of batch `before` per update of `after`; None if one is missing."""
        if before not in self.points or after not in self.points:
            return None
        return self.points[before] / self.points[after]


_FASHION_MNIST = {
    2: 21_200,
    8: 6_090,
    32: 1_730,
    128: 490,
    512: 294,
    2048: 164,
    8192: 150,
    32768: 163,
    55000: 150,
}
_CIFAR10 = {
    2: 118_900,
    8: 33_200,
    32: 6_440,
    64: 3_540,
    128: 2_030,
    256: 1_100,
    512: 894,
    1024: 778,
    2048: 956,
    8192: 966,
}

PUBLISHED: Mapping[str, Published] = {
    "fashion-mnist": Published(
        _FASHION_MNIST, "Shallue et al. 2018: simple CNN, 10% error, best of 100 trials"
    ),
    "cifar10": Published(_CIFAR10, "Shallue et al. 2018: ResNet-8, 30% error, best of 100 trials"),
}
"""Published points by name of the dataset."""
