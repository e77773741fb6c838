"""What `allstep run` was asked for, as the launcher takes it."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from allstep.errors import ConfigError, cut
from allstep.launch.hosts.parse import Host, check_counts

MAX_GRACE = 86_400.0
"""Seconds: a day. What is to be saved after a signal takes minutes."""


@dataclass(frozen=True)
class Job:
    """What to run and where. `hosts` say how many workers each one gets; rank 0 is on the first.

    Raises ConfigError for what no launcher can do, before anything is started.
    """

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
    foreground: bool = (
        False  # rank 0 keeps our standard output: a progress bar stays a progress bar
    )

    def __post_init__(self) -> None:
        if not self.command or not self.command[0].strip():
            raise ConfigError(
                "the command is empty; expected a program and its arguments, such as `python"
                " train.py`"
            )
        self._check_no_nul()
        # Written so that nan is refused, too.
        if not 0 <= self.grace <= MAX_GRACE:
            raise ConfigError(
                f"--grace {self.grace:g}: expected seconds from 0 to {MAX_GRACE:,.0f} (a day)"
            )
        check_counts(self.hosts)

    def _check_no_nul(self) -> None:
        """Raise ConfigError for text that the system cannot hand to a program."""
        for word in self.command:
            if "\0" in word:
                raise ConfigError(
                    f"the command holds a NUL byte, which no program can take: {word!r}"
                )
        for name, value in self.env.items():
            if "\0" in name + value:
                raise ConfigError(
                    f"the variable {name} holds a NUL byte, which no program can take:"
                    f" {cut(repr(value))}"
                )
