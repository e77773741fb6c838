"""The layer-wise optimizers written again in numpy, from the papers, one tensor at a time; and a
problem for them to step through.

A reference is a function (weights, gradient, state, step, exempt, options) -> weights; `state` is a
dict of its own for each tensor.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def lars(
    w: Array, g: Array, state: dict[str, Any], step: int, exempt: bool, o: dict[str, Any]
) -> Array:
    decay = 0.0 if exempt else o.get("weight_decay", 0.0)
    factor = 1.0 if exempt else _lars_factor(w, g, decay, o)
    d = factor * (g + decay * w)
    m = o.get("momentum", 0.9)
    state["v"] = v = m * state.get("v", 0.0) + d
    return w - o["lr"] * (d + m * v if o.get("nesterov") else v)


def _lars_factor(w: Array, g: Array, decay: float, o: dict[str, Any]) -> float:
    size, denominator = np.linalg.norm(w), np.linalg.norm(g) + decay * np.linalg.norm(w)
    if not (size > 0 and denominator > 0):
        return 1.0  # of the rate as it is: LARS and LARC alike
    factor = o["trust_coefficient"] * size / denominator
    return float(min(factor, o["lr"]) / o["lr"] if o.get("larc") else factor)


def larc(
    w: Array, g: Array, state: dict[str, Any], step: int, exempt: bool, o: dict[str, Any]
) -> Array:
    return lars(w, g, state, step, exempt, {**o, "larc": True})


def lamb(
    w: Array, g: Array, state: dict[str, Any], step: int, exempt: bool, o: dict[str, Any]
) -> Array:
    b1, b2 = o.get("betas", (0.9, 0.999))
    state["m"] = m = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = v = b2 * state.get("v", 0.0) + (1 - b2) * g * g
    u = (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + o.get("eps", 1e-6))
    if exempt:
        return w - o["lr"] * u
    u = u + o.get("weight_decay", 0.0) * w
    size, length = np.linalg.norm(w), np.linalg.norm(u)
    return w - o["lr"] * (size / length if size > 0 and length > 0 else 1.0) * u


def novograd(
    w: Array, g: Array, state: dict[str, Any], step: int, exempt: bool, o: dict[str, Any]
) -> Array:
    b1, b2 = o.get("betas", (0.95, 0.98))
    square = float((g * g).sum())
    kept = state.get("n", 0.0)
    state["n"] = n = b2 * kept + (1 - b2) * square if kept else square
    term = (
        g / (np.sqrt(n) + o.get("eps", 1e-8)) + (0.0 if exempt else o.get("weight_decay", 0.0)) * w
    )
    state["m"] = m = b1 * state.get("m", 0.0) + (1 - b1 if o.get("grad_averaging") else 1.0) * term
    return w - o["lr"] * m


SHAPES = [(4, 3), (4,), (2, 3, 2, 2), (), (5, 4), (3, 2)]
ZERO_WEIGHTS, ZERO_GRADIENTS = (
    4,
    5,
)  # a layer that starts at zero; one whose gradient is zero at times, the first among them


def start() -> list[Array]:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape) * 10.0 ** (number - 2) for number, shape in enumerate(SHAPES)]
    weights[ZERO_WEIGHTS] = np.zeros(SHAPES[ZERO_WEIGHTS])
    return [np.asarray(weight) for weight in weights]


def gradients(weights: list[Array], step: int, zero_at_first: bool = True) -> list[Array]:
    """Of a bowl whose bottom moves about: they depend on the weights, so that an error would grow."""
    found = [
        np.asarray(0.3 * weight - noise)
        for weight, noise in zip(weights, _noise(step), strict=True)
    ]
    if step % 7 == 1 and (zero_at_first or step > 1):
        found[ZERO_GRADIENTS] = np.zeros(SHAPES[ZERO_GRADIENTS])
    return found


@cache
def _noise(step: int) -> list[Array]:
    rng = np.random.default_rng(step)
    return [np.asarray(rng.normal(size=shape)) for shape in SHAPES]
