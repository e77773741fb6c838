"""The job of the launcher: the command, the hosts and the options of `allstep run`."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from allstep import faults
from allstep.errors import ConfigError, cut
from allstep.launch.hosts.host_list import Host, check_counts

MAX_GRACE = 86_400.0
"""Upper limit of `Job.grace`: a day, in seconds. Saving after a signal takes minutes."""


@dataclass(frozen=True)
class Job:
    """A command and the hosts to run it on. Raises ConfigError for values that cannot work.

    command: program and arguments. hosts: hosts with their numbers of workers; rank 0 is on the
    first. env: environment of the workers (default: os.environ). env_only: variables of `env` that
    other hosts get, besides those that workers need (default: all); workers on this host get all
    of `env`. cwd: working folder of the workers. show: ranks whose lines are printed (default:
    all). log_dir: folder for one log file per rank. stream_dir: folder for Horovod's two files per
    rank. prefix: start of printed lines, a name of `output.writer.PREFIXES`. timestamps: print the
    time in front of each line. iface: network interface to use. ssh: command that reaches another
    host. srun: start the agents as steps of this Slurm job instead. grace: seconds between a
    forwarded signal and SIGKILL. foreground: rank 0 inherits the launcher's standard output, so
    that its progress bar works. max_workers: upper limit of ranks, for the check of injected faults
    (default: the slots of the hosts). num_servers: parameter servers besides the workers.
    server_hosts: labels of the hosts that run them (default: those of workers).
    `ALLSTEP_STOP_SIGNAL` in `env` is one more signal to forward.
    """

    command: list[str]
    hosts: list[Host]
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    env_only: frozenset[str] | None = None
    cwd: str = field(default_factory=os.getcwd)
    show: frozenset[int] | None = None
    log_dir: Path | None = None
    stream_dir: Path | None = None
    prefix: str = "allstep"
    timestamps: bool = False
    iface: str | None = None
    ssh: str = "ssh"
    srun: bool = False
    grace: float = 30.0
    foreground: bool = False
    max_workers: int | None = None
    num_servers: int = 0
    server_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.command or not self.command[0].strip():
            raise ConfigError(
                "the command is empty; expected a program and its arguments, such as `python"
                " train.py`"
            )
        self._check_no_nul()
        # Written so that nan is refused too.
        if not 0 <= self.grace <= MAX_GRACE:
            raise ConfigError(
                f"--grace {self.grace:g}: expected seconds from 0 to {MAX_GRACE:,.0f} (a day)"
            )
        check_counts(self.hosts)
        size = self.max_workers or sum(host.slots for host in self.hosts)
        faults.check(self.env.get(faults.VARIABLE, ""), size)

    @property
    def server_places(self) -> tuple[str, ...]:
        """The labels of the hosts on which servers are started in turn."""
        return self.server_hosts or tuple(host.label for host in self.hosts if host.slots)

    def _check_no_nul(self) -> None:
        """Raise ConfigError for text that the system cannot pass to a program."""
        for argument in self.command:
            if "\0" in argument:
                raise ConfigError(
                    f"the command holds a NUL byte, which no program can take: {argument!r}"
                )
        for name, value in self.env.items():
            if "\0" in name + value:
                raise ConfigError(
                    f"the variable {name} holds a NUL byte, which no program can take:"
                    f" {cut(repr(value))}"
                )
