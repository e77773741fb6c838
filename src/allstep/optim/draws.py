"""Random numbers of a step, determined by (seed, samples seen, rank) alone: a resumed run draws the
numbers that the first run would have drawn.
"""

import torch

from allstep.errors import ConfigError

_MASK = (1 << 64) - 1


def step_seed(seed: int, seen: int, rank: int = 0) -> int:
    """Return a seed for the generator of one step; very different for neighboring steps and ranks.

    `seed`: of the run. `seen`: samples of the run before the step. `rank`: 0 (default) for numbers
    that are the same on all ranks.
    """
    if min(seed, seen, rank) < 0:
        raise ConfigError(
            f"random numbers are drawn from (seed, seen, rank), none below 0: not ({seed}, {seen},"
            f" {rank})"
        )
    return _mix(_mix(_mix(seed) + seen) + rank) >> 1


def _mix(number: int) -> int:
    """Return the next number of splitmix64 (Steele, Lea and Flood 2014).

    One changed input bit flips half of the output bits.
    """
    bits = (number + 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def seed_step(seed: int, seen: int, rank: int = 0) -> None:
    """Seed torch's own generators, which dropout uses, for the step after `seen` samples.

    Arguments as for `step_seed`. `torch.manual_seed` does the same for every kind of device; if
    CUDA was never used, it also records a whole traceback in each call, which takes 0.1 to 0.9 ms
    of a step.
    """
    number = step_seed(seed, seen, rank)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)


def generator(
    seed: int, seen: int, rank: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a new generator for the step after `seen` samples.

    Arguments as for `step_seed`; the same `rank` gives the same numbers on all ranks. `device`: of
    the random numbers (default: CPU).
    """
    return torch.Generator(device).manual_seed(step_seed(seed, seen, rank))
