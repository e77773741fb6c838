"""Starting workers, here and on other hosts, and never hiding why one failed.

`launch` runs a command on workers of this machine; `Job` and `Launcher` are the whole of it; `run`
calls a function on workers.

```
run_state          which rank failed first, when to stop, the exit code; pure (`run_events`)
failure            how one rank failed, cause or consequence, the report
restart            what follows a failure: a policy
launcher           the loop: links and signals to events, decisions to messages
orders             what each agent is to start: command, environment, addresses
agent, agent_main  one process per host that starts and watches its workers
messages, link     what launcher and agents send each other, and the way it takes
host_connection    the hosts as the launcher sees them: agent, link, ssh
hosts, output      names and addresses of hosts; lines of workers, log files
function           `run`, with function_worker and large_values
horovod, gloo      environments in which scripts for Horovod or Gloo get allstep (search_path)
job, signals       what was asked for; signals to the launcher
```

No torch and no numpy: may import what is below `comm` only. Start with `run_state`, then
`launcher`.
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


def launch(
    command: list[str],
    num_workers: int,
    *,
    foreground: bool = True,
    env: dict[str, str] | None = None,
) -> int:
    """Run a command on workers of this machine; the exit code of the run.

    foreground: rank 0 writes to our standard output itself, without a prefix, so that a terminal
    stays one. env: the workers' environment; ours when None.
    """
    job = Job(command, [Host("localhost", num_workers)], foreground=foreground)
    if env is not None:
        job = Job(command, job.hosts, env=env, foreground=foreground)
    return Launcher(job).run()
