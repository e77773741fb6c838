"""The engine's settings from the environment, read once at its start."""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from allstep.errors import ConfigError
from allstep.limits import Limits


@dataclass(frozen=True)
class Settings:
    """The settings of an engine.

    `fusion`: maximum bytes of fused operations. `fuse_groups`: whether operations of different
    groups may be fused. `stall`: seconds after which missing ranks are reported; 0 is never.
    `stall_stop`: seconds after which a stall stops all engines; 0 is never. `timeout`: seconds
    after which a waiting operation is an error. `dynamic`: whether process sets may change. `core`:
    the core of the engine's thread; None for any.
    """

    fusion: int
    fuse_groups: bool
    stall: float
    stall_stop: float
    timeout: float
    dynamic: bool
    core: int | None = None


def read_settings(
    limits: Limits, local_rank: int, dynamic: bool, env: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings of this process; raise ConfigError for an invalid variable."""
    env = os.environ if env is None else env
    stop = number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0, env)
    if 0 < stop < limits.stall and local_rank == 0:
        why = f"is less than the {limits.stall:g} s after which a stall is reported"
        print(
            f"allstep: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={stop:g} is ignored: it {why}",
            file=sys.stderr,
        )
    stall = 0.0 if number("HOROVOD_STALL_CHECK_DISABLE", 0, env) > 0 else limits.stall
    return Settings(
        fusion=int(number("HOROVOD_FUSION_THRESHOLD", 128 << 20, env)),
        fuse_groups=not number("HOROVOD_DISABLE_GROUP_FUSION", 0, env) > 0,
        stall=stall,
        stall_stop=stop if stop >= limits.stall else 0.0,
        timeout=limits.timeout,
        dynamic=dynamic or number("HOROVOD_DYNAMIC_PROCESS_SETS", 0, env) > 0,
        core=_core(local_rank, env),
    )


def _core(local_rank: int, env: Mapping[str, str]) -> int | None:
    """Return the core for the engine's thread from HOROVOD_THREAD_AFFINITY, or None.

    The variable lists one core for each rank of the host, separated by commas.
    """
    text = env.get("HOROVOD_THREAD_AFFINITY", "")
    cores = [part.strip() for part in text.split(",") if part.strip()]
    if not cores:
        return None
    if not all(core.isdigit() for core in cores) or len(cores) <= local_rank:
        raise ConfigError(
            f"HOROVOD_THREAD_AFFINITY={text!r} is not a list of cores, one for each rank of the"
            " host: 0,1"
        )
    return int(cores[local_rank])


def number(name: str, default: float, env: Mapping[str, str]) -> float:
    """Return an environment variable that is a number of at least 0."""
    text = env.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name}={text!r} is not a number of at least 0")
    return value
