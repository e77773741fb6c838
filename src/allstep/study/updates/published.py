"""Published points that our curves are drawn beside, as a shape: other models, other goals, far more
tuning.

Updates to a validation error by batch, the best of 100 tuned trials for each, Nesterov momentum:
Shallue et al. 2018 (arXiv 1811.03600), read off the figures of the authors' notebook to 5 to 8%.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Updates by batch, and whose they are."""

    points: Mapping[int, int]
    source: str

    def ratio(self, before: int, after: int) -> float | None:
        """How many times fewer updates the larger batch needs; None where one of them is not there."""
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
"""By the name of the data."""
