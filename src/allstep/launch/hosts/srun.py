"""The nodes of a Slurm allocation, and agents that srun starts on them instead of ssh (`--srun`).

Each agent is a job step of its own, so that a lost node is one lost host:

```
srun --nodes=1 --ntasks=1 --nodelist=NODE --overlap --no-kill  python -m ...agent_main NODE
     one task on one node                 |         `- Slurm does not end the step when a node fails
                                          `- several steps share the resources of the allocation
```

srun passes its own environment on, so variables need no shell quoting. Variables by which Slurm
describes a step (`SLURM_*`, devices) are those of the agent's own step and are not sent.
"""

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping

from allstep.errors import ConfigError, WorldError, cut
from allstep.launch.hosts import ssh
from allstep.launch.hosts.host_list import Host
from allstep.process.python import module_flags
from allstep.world import tasks_per_node

NODES = "SLURM_JOB_NODELIST"
TASKS = "SLURM_TASKS_PER_NODE"
# Options of the job that srun would apply to the step of an agent, which is one task.
_OPTIONS_OF_JOB = re.compile(
    r"SLURM_(N(TASKS|PROCS)(_PER_\w+)?|CPUS_PER_TASK|GPUS_PER_TASK|TRES_PER_TASK|THREADS_PER_CORE"
    r"|TASKS_PER_NODE|NNODES|JOB_NUM_NODES|DISTRIBUTION|EXACT|EXCLUSIVE|OVERLAP|KILL_BAD_EXIT"
    r"|LABELIO|UNBUFFEREDIO|STD\w+MODE|MPI_TYPE)"
)
# Variables that describe the step of a process, or the devices that Slurm gives to it.
_OF_STEP = ("SLURM", "SRUN_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_OF_USER = ("PATH", "HOME", "USER", "LOGNAME", "SHELL")
# Upper limit of the nodes in a list; the largest clusters have some ten thousand.
_MAX_NODES = 1 << 16
_PART = re.compile(r"(?P<text>[^\[\],\s]*)\[(?P<ranges>[0-9,-]+)\]|(?P<plain>[^\[\],\s]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def allocation(env: Mapping[str, str]) -> list[Host]:
    """Return the nodes of the Slurm allocation that `env` describes, with tasks as slots.

    Raises ConfigError outside an allocation, WorldError for variables that are not understood.
    """
    if not env.get("SLURM_JOB_ID") or not env.get(NODES):
        raise ConfigError(
            f"--srun: this is not a Slurm allocation (SLURM_JOB_ID and {NODES} are not set); start"
            " it in a job script (sbatch) or under salloc, or give hosts for ssh with -H"
        )
    names = expand_nodes(env[NODES])
    tasks = tasks_per_node(env[TASKS], TASKS) if env.get(TASKS) else [1] * len(names)
    if len(tasks) != len(names):
        raise WorldError(
            f"{NODES}={cut(env[NODES])} has {len(names)} nodes, but {TASKS}={cut(env[TASKS])}"
            f" {len(tasks)}; give the hosts and their slots with -H"
        )
    return [Host(name, slots) for name, slots in zip(names, tasks, strict=True)]


def check_in_allocation(hosts: Collection[Host], env: Mapping[str, str]) -> None:
    """Raise ConfigError for a host that is not in the allocation."""
    nodes = [host.name for host in allocation(env)]
    for host in hosts:
        if host.name not in nodes:
            raise ConfigError(
                f"--srun: host {host.name} is not in this allocation ({cut(env[NODES])}); name its"
                " nodes, or leave -H out to use all of them"
            )


def expand_nodes(text: str) -> list[str]:
    """Return the names in Slurm's notation: `n[1-2,07],login` as n1, n2, n07, login.

    A name may have several ranges: `r[0-1]n[0-3]`. Raises WorldError for other texts.
    """
    names: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        names += _expand_item(item, text)
        if len(names) > _MAX_NODES:
            raise WorldError(f"{NODES}={cut(text)} has more than {_MAX_NODES:,} nodes")
    return names


def _expand_item(item: str, text: str) -> list[str]:
    names, position = [""], 0
    while position < len(item):
        match = _PART.match(item, position)
        if match is None:
            break
        position = match.end()
        ends = [match["plain"]]
        if match["ranges"]:
            ends = [match["text"] + number for number in _numbers(match["ranges"], text)]
        if len(names) * len(ends) > _MAX_NODES:
            raise WorldError(f"{NODES}={cut(text)} has more than {_MAX_NODES:,} nodes")
        names = [name + end for name in names for end in ends]
    if not item or position < len(item):
        raise WorldError(f"{NODES}={cut(text)} is not a list like n[1-2,07],login")
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    """Return the numbers of `1-2,07` with their leading zeros."""
    numbers: list[str] = []
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        if match is None:
            raise WorldError(f"{NODES}={cut(text)} is not a list like n[1-2,07],login")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= _MAX_NODES:
            raise WorldError(f"{NODES}={cut(text)} has more than {_MAX_NODES:,} nodes")
        numbers += [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)]
    return numbers


def command_on(node: str, *python_arguments: str) -> list[str]:
    """Return the srun command that runs this interpreter on a node, as a job step of its own."""
    options = ["--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap", "--no-kill"]
    return ["srun", *options, sys.executable, *python_arguments]


def start_agent(node: str, env: Mapping[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    """Start the agent on a node; its stdout has the agent's messages, its stderr srun's errors.

    env: the variables that the node gets, apart from those of this job.
    """
    own = {name: value for name, value in os.environ.items() if name.startswith("SLURM")}
    kept = {name: value for name, value in own.items() if not _OPTIONS_OF_JOB.fullmatch(name)}
    user = {name: os.environ[name] for name in _OF_USER if name in os.environ}
    command = command_on(node, *module_flags("allstep.launch.agent_main"), node, *arguments)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**env, **user, **kept},
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(
            f"--srun: cannot start srun to reach {node}: {error.strerror}; install Slurm's client"
            " programs here, or give hosts for ssh with -H"
        ) from error


def forwarded(env: Mapping[str, str], only: Collection[str] | None = None) -> dict[str, str]:
    """Return the variables of `env` to send to a node: as with ssh, without those of a step."""
    sent = ssh.forwarded(dict(env), only)
    return {name: value for name, value in sent.items() if not name.startswith(_OF_STEP)}


def describe_failure(node: str, code: int | None, stderr: str, stdout: str = "") -> str:
    """Return one line about an agent that did not start. code: exit code of srun."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # After its reason srun reports consequences.
    errors = [line for line in lines if "error: " in line]
    reason = (errors or lines or [stdout or "it printed nothing"])[0].removeprefix("srun: error: ")
    if "No module named" in stderr:
        reason = next(line for line in lines if "No module named" in line)
        return f"{node}: {reason}: allstep must be installed there for {sys.executable}"
    attempt = f"srun --overlap --nodelist={node} --ntasks=1 true"
    return f"srun to {node} failed (exit code {code}): {reason}. Try `{attempt}`"
