"""Starting workers, here and on other hosts, and never hiding why one failed. No torch in here.

`launch` runs a command on workers of this machine; `Job` and `Launcher` are the whole of it; `run` calls a function on workers.
"""

from allstep.launch.function import run
from allstep.launch.hosts.discovery import discover
from allstep.launch.hosts.parse import Host, assign, parse_hosts, read_hostfile
from allstep.launch.hosts.ssh import parse_env_only
from allstep.launch.job import Job
from allstep.launch.launcher import RESUBMIT, Launcher

__all__ = [
    "RESUBMIT",
    "Host",
    "Job",
    "Launcher",
    "assign",
    "discover",
    "launch",
    "parse_env_only",
    "parse_hosts",
    "read_hostfile",
    "run",
]


def launch(command: list[str], num_workers: int, *, foreground: bool = True, env: dict[str, str] | None = None) -> int:
    """Run a command on workers of this machine; the exit code of the run.

    foreground: rank 0 writes to our standard output itself, without a prefix, so that a terminal stays one.
    env: the workers' environment; ours when None.
    """
    job = Job(command, [Host("localhost", num_workers)], foreground=foreground)
    if env is not None:
        job = Job(command, job.hosts, env=env, foreground=foreground)
    return Launcher(job).run()
