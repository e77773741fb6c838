"""Published points that our curves are drawn beside, as a shape: another net, another goal, far more tuning."""

from collections.abc import Mapping

FASHION_MNIST: Mapping[int, int] = {
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
"""Updates to 10% validation error on Fashion-MNIST by batch: simple CNN, Nesterov momentum, the best of 100 tuned trials each. Shallue et
al. 2018 (arXiv 1811.03600), read off the figures of the authors' notebook to 5 to 8%."""

SOURCE = "Shallue et al. 2018: simple CNN, 10% error, best of 100 trials"
