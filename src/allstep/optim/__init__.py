"""Methods that preserve accuracy while the batch grows: optimizers, learning rates, noise. The
package does not know about workers: their values are arguments.

Optimizers: `LARS`, `LARC`, `LAMB`, `NovoGrad`, and `groups` for parameters that they exempt.
Learning rate: schedules over the samples seen (`SCHEDULES`, `WARM_UPS`, `Rate`), rules that scale a
learning rate with the batch (`SCALINGS`), and `scale`, which turns a small-batch `Recipe` into its
large-batch form. Noise: `NoisyGradients` and `sample_weights` add noise, `RunningNoiseScale`
measures the gradient's noise and recommends a batch.
"""

from allstep.optim.gradient_noise import NoisyGradients, add_noise
from allstep.optim.lamb import LAMB
from allstep.optim.larc import LARC
from allstep.optim.lars import LARS
from allstep.optim.noise_scale import (
    Estimate,
    advice,
    estimate,
    from_workers,
    measure,
    squared_norm,
)
from allstep.optim.noise_scale import Running as RunningNoiseScale
from allstep.optim.novograd import NovoGrad
from allstep.optim.parameter_groups import groups, is_exempt
from allstep.optim.rate import Rate
from allstep.optim.recipe import RULES, Recipe
from allstep.optim.sample_noise import noise_variance, sample_weights
from allstep.optim.scaled_recipe import Scaled, scale
from allstep.optim.scaling_rules import (
    SCALINGS,
    linear_scaling,
    momentum_correction,
    no_scaling,
    square_root_scaling,
)
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
from allstep.optim.step_draws import generator, seed_step, step_seed

__all__ = [
    "Estimate",
    "LAMB",
    "LARC",
    "LARS",
    "NoisyGradients",
    "NovoGrad",
    "RULES",
    "Rate",
    "Recipe",
    "RunningNoiseScale",
    "SCALINGS",
    "SCHEDULES",
    "Scaled",
    "WARM_UPS",
    "add_noise",
    "advice",
    "constant",
    "cosine",
    "estimate",
    "exponential",
    "from_workers",
    "generator",
    "groups",
    "is_exempt",
    "linear",
    "linear_scaling",
    "measure",
    "momentum_correction",
    "no_scaling",
    "noise_variance",
    "one_cycle",
    "polynomial",
    "sample_weights",
    "scale",
    "seed_step",
    "square_root_scaling",
    "squared_norm",
    "step_seed",
    "steps",
    "warm_up",
]
