"""Starts workers on this host and on others, and reports the first failure.

`launch` runs a command on workers of this machine; `Job` and `Launcher` run any job; `run` calls a
function on workers.

```
run_state              which rank failed first, when to stop, the exit code; pure (`run_events`)
cause                  how one rank failed, cause or consequence, the report
restart                the policy that decides what follows a failure
roster                 which workers are in an elastic world; pure
elastic                the launcher of an elastic run, which carries the roster's actions out
launcher               the loop: links and signals to events, decisions to messages
orders                 the command, environment and addresses that each agent receives
agent, agent_main      one process per host that starts its workers (worker_stream: their output)
messages, link         the messages between launcher and agents, and their channel
host_connection        the launcher's connection to a host: agent, link, ssh
hosts, output          names and addresses of hosts; lines of workers, log files
function               `run`, with function_worker and large_values
horovod, gloo          environments in which scripts for Horovod or Gloo use allstep (search_path)
job, signals           the options of a run; signals to the launcher
```

No torch and no numpy: imports only from layers below `comm`. Start with `run_state`, then
`launcher`.
"""

import os

from allstep.launch.elastic import ElasticLauncher
from allstep.launch.function import run
from allstep.launch.hosts.discovery import Discovery, discover
from allstep.launch.hosts.host_list import MAX_WORKERS, Host, assign, parse_hosts, read_hostfile
from allstep.launch.hosts.srun import allocation, check_in_allocation
from allstep.launch.hosts.ssh import parse_env_only
from allstep.launch.job import Job
from allstep.launch.launcher import RESUBMIT, Launcher
from allstep.launch.roster import MAX_FAILURES, Policy
from allstep.launch.server_processes import server_hosts, with_server_hosts

__all__ = [
    "MAX_FAILURES",
    "MAX_WORKERS",
    "RESUBMIT",
    "Discovery",
    "ElasticLauncher",
    "Host",
    "Job",
    "Launcher",
    "Policy",
    "allocation",
    "assign",
    "check_in_allocation",
    "discover",
    "launch",
    "parse_env_only",
    "parse_hosts",
    "read_hostfile",
    "run",
    "server_hosts",
    "with_server_hosts",
]


def launch(
    command: list[str],
    num_workers: int,
    *,
    foreground: bool = True,
    env: dict[str, str] | None = None,
    policy: Policy | None = None,
) -> int:
    """Run `command` on `num_workers` workers of this machine; return the exit code of the run.

    foreground: rank 0 inherits this process's standard output, without a prefix, so that it writes
    to the terminal itself (default); in an elastic run all workers do. env: the environment of the
    workers (default: os.environ). policy: makes the run elastic.
    """
    slots = num_workers if policy is None else policy.num_slots
    most = num_workers if policy is None else policy.most_ranks
    environment = dict(os.environ) if env is None else env
    hosts = [Host("localhost", slots)]
    job = Job(command, hosts, env=environment, foreground=foreground, max_workers=most)
    return (Launcher(job) if policy is None else ElasticLauncher(job, policy)).run()
