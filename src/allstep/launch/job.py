"""What `allstep run` was asked for, as the launcher takes it."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from allstep.launch.hosts import Host


@dataclass(frozen=True)
class Job:
    """What to run and where. `hosts` say how many workers each one gets; rank 0 is the first of the first."""

    command: list[str]
    hosts: list[Host]
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    # Variables of `env` that other hosts get, besides those that workers need; None for all.
    # Workers here get all of `env`.
    env_only: frozenset[str] | None = None
    cwd: str = field(default_factory=os.getcwd)
    show: frozenset[int] | None = None
    log_dir: Path | None = None
    stream_dir: Path | None = None
    prefix: str = "allstep"  # of the printed lines: a name of output.PREFIXES
    timestamps: bool = False
    iface: str | None = None
    ssh: str = "ssh"
    grace: float = 30.0
    foreground: bool = False  # rank 0 keeps our standard output: a progress bar stays a progress bar
