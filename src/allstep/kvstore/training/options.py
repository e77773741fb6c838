"""The settings of training on shared weights."""

from dataclasses import dataclass

from allstep.errors import ConfigError, did_you_mean
from allstep.kvstore.training.corrections import CORRECTIONS, DELAY_STRENGTH
from allstep.parallel.sync_mode import SyncMode

MODES = ("async", "stale", "clock", "lazy", "elastic")
"""Modes of this package."""


@dataclass(frozen=True)
class Options:
    """How the parties of a host train together; the same on all of them.

    mode: one of `MODES`. epoch_size: samples of an epoch. correct: see `corrections`. delay: the
    strength of `correct="delay"`. scale: multiply the learning rate of a push by its samples /
    batch (D18). alpha: the part of their distance by which a party and the center of `elastic:H`
    move; None: 0.9 / parties. num_values: numbers that a party may pass to `gather`. log_capacity:
    pushes of a round at most.
    """

    mode: SyncMode
    epoch_size: int
    correct: str = "none"
    delay: float = DELAY_STRENGTH
    scale: bool = True
    alpha: float | None = None
    num_values: int = 64
    log_capacity: int = 16384

    def __post_init__(self) -> None:
        if self.mode.name not in MODES:
            raise ConfigError(f"sync={self.mode}: expected one of {', '.join(MODES)}")
        if self.correct not in CORRECTIONS:
            raise ConfigError(
                f"sync.correct={self.correct}: unknown correction;"
                f" {did_you_mean(self.correct, CORRECTIONS)}"
            )
        if self.epoch_size < 1 or self.log_capacity < 1:
            raise ConfigError(
                f"epoch_size={self.epoch_size}, log_capacity={self.log_capacity}: expected 1 or"
                " more"
            )

    @property
    def steps(self) -> int:
        """The steps of a push."""
        return self.mode.number if self.mode.name in ("lazy", "elastic") else 1

    @property
    def is_elastic(self) -> bool:
        """Whether each party makes its steps on weights of its own."""
        return self.mode.name == "elastic"

    @property
    def strength(self) -> float:
        """The strength of the compensation of delays; 0 for none."""
        return self.delay if self.correct == "delay" else 0.0
