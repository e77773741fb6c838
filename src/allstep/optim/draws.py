"""Random numbers of a step, from (seed, samples seen, rank) alone: a resumed run draws what the first one would have drawn."""

import numpy as np
import torch

from allstep.errors import ConfigError


def step_seed(seed: int, seen: int, rank: int = 0) -> int:
    """One number for the step after `seen` samples, to seed a generator with; far apart for neighbouring steps and ranks."""
    if min(seed, seen, rank) < 0:
        raise ConfigError(
            f"random numbers are drawn from (seed, seen, rank), none below 0: not ({seed}, {seen}, {rank})"
        )
    word = np.random.SeedSequence([seed, seen, rank]).generate_state(1, np.uint64)[0]
    return int(word >> np.uint64(1))


def generator(seed: int, seen: int, rank: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for the step after `seen` samples. The same rank everywhere gives the same numbers everywhere."""
    return torch.Generator(device).manual_seed(step_seed(seed, seen, rank))
