"""Four time limits, read in one place. Each has Horovod's variable of the same meaning as an alias.

================================================================================================================================
ALLSTEP_START_TIMEOUT   30     all ranks must have turned up after so many seconds
HOROVOD_START_TIMEOUT ALLSTEP_LOST_SECONDS    10     a host without sign of life for so long is lost
(none)
                               (for an agent a launcher: after 0.7 of it)
ALLSTEP_STALL_SECONDS   60     after so long, report which ranks a collective waits for
HOROVOD_STALL_CHECK_TIME_SECONDS ALLSTEP_TIMEOUT       1800     after so long, a collective that
waits is an error           HOROVOD_GLOO_TIMEOUT_SECONDS
================================================================================================================================

Each is above 0 and at most a year (31,536,000 s), which serves for "never". Infinity and nan are
refused: they reach timers of the kernel and of other libraries that have no such number.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from allstep.errors import ConfigError


class Limits(NamedTuple):
    """Seconds."""

    start: float
    lost: float
    stall: float
    timeout: float

    @property
    def beat(self) -> float:
        """Between two signs of life of launcher and agents: 1 s, or less when `lost` is short."""
        return min(1.0, _BEAT_SHARE * self.lost)

    @property
    def lost_for_agent(self) -> float:
        """How long an agent waits for a silent launcher; the launcher waits longer for it.

        So the workers behind a cut cable are killed before the launcher counts them as lost, and a
        world that it forms without them never runs at the same time as theirs. Both sides notice a
        silence up to a beat late: 0.7 + 0.1 < 1 - 0.1.
        """
        return _AGENT_SHARE * self.lost


MOST_SECONDS = 365 * 24 * 3600.0
_AGENT_SHARE = 0.7
_BEAT_SHARE = 0.1
_VARIABLES = {
    "start": (30.0, ("ALLSTEP_START_TIMEOUT", "HOROVOD_START_TIMEOUT")),
    "lost": (10.0, ("ALLSTEP_LOST_SECONDS",)),
    "stall": (60.0, ("ALLSTEP_STALL_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS")),
    "timeout": (1800.0, ("ALLSTEP_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS")),
}


def read_limits(env: Mapping[str, str] | None = None) -> Limits:
    """The limits that hold for this process."""
    env = os.environ if env is None else env
    return Limits(
        **{field: _seconds(env, names, default) for field, (default, names) in _VARIABLES.items()}
    )


def _seconds(env: Mapping[str, str], names: tuple[str, ...], default: float) -> float:
    name = next((name for name in names if env.get(name)), None)
    if name is None:
        return default
    try:
        value = float(env[name])
    except ValueError:
        value = 0.0
    # Also false for nan.
    if not 0 < value <= MOST_SECONDS:
        raise ConfigError(
            f"{name}={env[name]!r} is no time limit: expected seconds above 0 and at most"
            f" {MOST_SECONDS:.0f} (a year)"
        )
    return value
