"""The four timeouts, in seconds. Horovod's variable of the same meaning is an alias.

======================  =======  ==============================================================
variable                default  meaning (alias)
======================  =======  ==============================================================
ALLSTEP_START_TIMEOUT        30  time in which all ranks must join (HOROVOD_START_TIMEOUT)
ALLSTEP_LOST_SECONDS         10  silence after which a host is lost; for an agent, the launcher
                                 is lost after 0.7 of it (no alias)
ALLSTEP_STALL_SECONDS        60  wait after which the missing ranks of a collective are reported
                                 (HOROVOD_STALL_CHECK_TIME_SECONDS)
ALLSTEP_TIMEOUT            1800  wait after which a collective raises an error
                                 (HOROVOD_GLOO_TIMEOUT_SECONDS)
======================  =======  ==============================================================

Each is above 0 and at most a year (31,536,000 s), which serves for "never". Infinity and nan are
refused, because timers of the kernel and of other libraries cannot represent them.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from allstep.errors import ConfigError


class Limits(NamedTuple):
    """The timeouts of a process, in seconds; see the table above."""

    start: float
    lost: float
    stall: float
    timeout: float

    @property
    def beat(self) -> float:
        """Return the seconds between two signs of life: 1, or less if `lost` is short."""
        return min(1.0, _BEAT_SHARE * self.lost)

    @property
    def lost_for_agent(self) -> float:
        """Return the seconds that an agent waits for a silent launcher; the launcher waits longer.

        So the workers behind a cut cable are killed before the launcher counts them as lost, and a
        world that it forms without them never runs at the same time as theirs. Both sides notice
        silence up to one beat late: 0.7 + 0.1 < 1 - 0.1.
        """
        return _AGENT_SHARE * self.lost


MAX_SECONDS = 365 * 24 * 3600.0
_AGENT_SHARE = 0.7
_BEAT_SHARE = 0.1
_VARIABLES = {
    "start": (30.0, ("ALLSTEP_START_TIMEOUT", "HOROVOD_START_TIMEOUT")),
    "lost": (10.0, ("ALLSTEP_LOST_SECONDS",)),
    "stall": (60.0, ("ALLSTEP_STALL_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS")),
    "timeout": (1800.0, ("ALLSTEP_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS")),
}


def read_limits(env: Mapping[str, str] | None = None) -> Limits:
    """Return the timeouts that `env` sets (default: os.environ); ConfigError for a bad value."""
    env = os.environ if env is None else env
    return Limits(
        **{
            field: read_seconds(env, names, default)
            for field, (default, names) in _VARIABLES.items()
        }
    )


def read_seconds(env: Mapping[str, str], names: tuple[str, ...], default: float) -> float:
    """Return the seconds of the first variable that is set, else `default`; ConfigError if bad."""
    name = next((name for name in names if env.get(name)), None)
    if name is None:
        return default
    try:
        value = float(env[name])
    except ValueError:
        value = 0.0
    # Also false for nan.
    if not 0 < value <= MAX_SECONDS:
        raise ConfigError(
            f"{name}={env[name]!r} is no timeout: expected seconds above 0 and at most"
            f" {MAX_SECONDS:.0f} (a year)"
        )
    return value
