"""What sets the size of a step: schedules over the samples seen, and the rule that scales a rate with the batch."""

from allstep.optim.scaling import SCALINGS, linear_scaling, no_scaling
from allstep.optim.schedules import SCHEDULES, constant, cosine, linear, warm_up

__all__ = ["SCALINGS", "SCHEDULES", "constant", "cosine", "linear", "linear_scaling", "no_scaling", "warm_up"]
