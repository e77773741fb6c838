"""What the engine can be told by the environment, read once at its start."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from allstep.errors import ConfigError
from allstep.limits import Limits


@dataclass(frozen=True)
class Settings:
    """Seconds, bytes and yes or no.

    fusion: operations are fused up to so many bytes. stall: after so long missing ranks are reported, 0 is never; stall_stop: after so
    long everything stops, 0 is never. timeout: an operation that waits so long is an error. dynamic: whether sets may change.
    """

    fusion: int
    fuse_groups: bool
    stall: float
    stall_stop: float
    timeout: float
    dynamic: bool


def read_settings(limits: Limits, dynamic: bool, env: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process."""
    env = os.environ if env is None else env
    stop = number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0, env)
    stall = 0.0 if number("HOROVOD_STALL_CHECK_DISABLE", 0, env) > 0 else limits.stall
    return Settings(
        fusion=int(number("HOROVOD_FUSION_THRESHOLD", 128 << 20, env)),
        fuse_groups=not number("HOROVOD_DISABLE_GROUP_FUSION", 0, env) > 0,
        stall=stall,
        stall_stop=stop if stop >= limits.stall else 0.0,
        timeout=limits.timeout,
        dynamic=dynamic or number("HOROVOD_DYNAMIC_PROCESS_SETS", 0, env) > 0,
    )


def number(name: str, default: float, env: Mapping[str, str]) -> float:
    """A variable that is a number from 0."""
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ConfigError(f"{name}={text!r} is not a number from 0")
    return value
