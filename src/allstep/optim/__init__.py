"""What keeps accuracy while the batch grows: optimizers, learning rates, noise. Knows no workers: what it needs of them is passed in.

Optimizers: `LARS`, `LARC`, `LAMB`, `NovoGrad`, and `groups` for what they leave alone. Learning rate: schedules over the samples seen, and
the rule that scales a rate with the batch.
"""

from allstep.optim.groups import groups, is_exempt
from allstep.optim.lamb import LAMB
from allstep.optim.larc import LARC
from allstep.optim.lars import LARS
from allstep.optim.novograd import NovoGrad
from allstep.optim.scaling import SCALINGS, linear_scaling, no_scaling
from allstep.optim.schedules import SCHEDULES, constant, cosine, linear, warm_up

__all__ = [
    "LAMB",
    "LARC",
    "LARS",
    "NovoGrad",
    "SCALINGS",
    "SCHEDULES",
    "constant",
    "cosine",
    "groups",
    "is_exempt",
    "linear",
    "linear_scaling",
    "no_scaling",
    "warm_up",
]
