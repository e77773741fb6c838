"""Names for this host and for the running job, from the launcher's variables."""

import os
import re
import socket
from pathlib import Path

from allstep.world.launcher_variables import LAUNCHERS, Environment, first_set
from allstep.world.value import World


def node_of(world: World, env: Environment | None = None) -> str:
    """Return a text that is unique to this host among those of the run.

    It is the launcher's own number or name of the host, if there is one; else the host name and the
    kernel's boot id, which no two machines share.
    """
    env = os.environ if env is None else env
    if world.launcher in LAUNCHERS:
        name = first_set(LAUNCHERS[world.launcher].node, env)
        if name:
            return f"{name}={env[name]}"
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot_id}"
    except OSError:
        return socket.gethostname()


def local_variables(world: World, env: Environment | None = None) -> str:
    """Return the launcher's variables of local rank and size, for errors; "" if it sets none."""
    env = os.environ if env is None else env
    known = LAUNCHERS.get(world.launcher)
    names = [first_set(known.local_rank, env), first_set(known.local_size, env)] if known else []
    return ", ".join(f"{name}={env[name]}" for name in names if name) if all(names) else ""


def job_of(world: World, env: Environment | None = None) -> str:
    """Return a name of the running job, the same in all its processes on this host and unique."""
    env = os.environ if env is None else env
    known = LAUNCHERS[world.launcher]
    parts = [env[name] for name in known.job if env.get(name)]
    if not parts:
        parts = [f"parent{os.getppid()}"]
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([known.name, *parts]))
