"""What a run needs for its shares: the rule of `shares=speed`, and what ranks exchange for it."""

from allstep.train.config.run_config import ResolvedConfig
from allstep.train.step.speed_rule import SpeedRule


def make_rule(config: ResolvedConfig, size: int) -> SpeedRule | None:
    """Return the rule of `shares=speed` for a world of `size` workers, with even shares at first.

    Return None if the shares of the run do not change. After an elastic change the new world has a
    new rule, because other workers have other speeds.
    """
    if config.shares != "speed" or size == 1:
        return None
    # A micro-batch of one sample has no variance for a batch norm.
    samples = 2 * config.accumulation if config.model.norm == "batch" else 1
    return SpeedRule(size, samples)


def exchanged(config: ResolvedConfig) -> tuple[str, ...]:
    """Return the fields of `StepReport` that each rank needs of all others."""
    if config.shares == "speed":
        return ("samples", "seconds")
    return ("samples",) if measures_noise(config) else ()


def measures_noise(config: ResolvedConfig) -> bool:
    """Return whether the run measures the gradient noise scale."""
    return config.noise_scale or config.growth.by_noise
