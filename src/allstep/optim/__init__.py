"""What keeps accuracy while the batch grows: optimizers, learning rates, noise. Knows no workers: what it needs of them is passed in.

Optimizers: `LARS`, `LARC`, `LAMB`, `NovoGrad`, and `groups` for what they leave alone. Learning rate: schedules over the samples seen
(`SCHEDULES`, `WARM_UPS`, `Rate`), rules that scale a rate with the batch (`SCALINGS`), and `scale`, which turns a small-batch `Recipe` into
its large-batch form.
"""

from allstep.optim.groups import groups, is_exempt
from allstep.optim.lamb import LAMB
from allstep.optim.larc import LARC
from allstep.optim.lars import LARS
from allstep.optim.novograd import NovoGrad
from allstep.optim.rate import Rate
from allstep.optim.recipe import RULES, Recipe
from allstep.optim.scale import Scaled, scale
from allstep.optim.scaling import SCALINGS, linear_scaling, momentum_correction, no_scaling, square_root_scaling
from allstep.optim.schedules import (
    SCHEDULES,
    WARM_UPS,
    constant,
    cosine,
    exponential,
    linear,
    one_cycle,
    polynomial,
    steps,
    warm_up,
)

__all__ = [
    "LAMB",
    "LARC",
    "LARS",
    "NovoGrad",
    "RULES",
    "Rate",
    "Recipe",
    "SCALINGS",
    "SCHEDULES",
    "Scaled",
    "WARM_UPS",
    "constant",
    "cosine",
    "exponential",
    "groups",
    "is_exempt",
    "linear",
    "linear_scaling",
    "momentum_correction",
    "no_scaling",
    "one_cycle",
    "polynomial",
    "scale",
    "square_root_scaling",
    "steps",
    "warm_up",
]
