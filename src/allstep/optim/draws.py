"""Random numbers of a step, from (seed, samples seen, rank) alone: a resumed run draws what the
first one would have drawn."""

import torch

from allstep.errors import ConfigError

_WORD = (1 << 64) - 1


def step_seed(seed: int, seen: int, rank: int = 0) -> int:
    """One number for the step after `seen` samples, to seed a generator with; far apart for
    neighbouring steps and ranks."""
    if min(seed, seen, rank) < 0:
        raise ConfigError(
            f"random numbers are drawn from (seed, seen, rank), none below 0: not ({seed}, {seen},"
            f" {rank})"
        )
    return _mix(_mix(_mix(seed) + seen) + rank) >> 1


def _mix(number: int) -> int:
    """The next number of splitmix64 (Steele, Lea and Flood 2014): one bit in flips half of the bits
    out."""
    word = (number + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def seed_step(seed: int, seen: int, rank: int = 0) -> None:
    """Sets torch's own generators for the step after `seen` samples: what dropout draws from.

    `torch.manual_seed` does the same for every kind of device there could be; where CUDA was never
    used, it writes down a whole traceback at each call, 0.1 to 0.9 ms of a step.
    """
    number = step_seed(seed, seen, rank)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)


def generator(
    seed: int, seen: int, rank: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A fresh generator for the step after `seen` samples.

    The same rank everywhere gives the same numbers everywhere.
    """
    return torch.Generator(device).manual_seed(step_seed(seed, seen, rank))
