"""Parameter servers of a run: which host runs which of them, and how its agent starts them.

    allstep run -np 4 -H h1:2,h2:2 --servers 2 --server-hosts s1,s2 python train.py

Servers are processes besides the workers: they have no rank, and the run does not wait for them.
They are spread over the hosts in turn: those of `--server-hosts`, else those of the workers. The
agent starts them before the workers, and kills them with what else is left at the end of the run. A
server that dies earlier is reported by the workers that need it (`allstep.kvstore`).
"""

import subprocess
from collections.abc import Mapping, Sequence

from allstep.errors import ConfigError
from allstep.launch.hosts.host_list import Host, parse_hosts
from allstep.process.family import die_with_parent
from allstep.process.python import run_module

COUNT = "ALLSTEP_SERVERS"
"""Environment variable of workers: how many servers there are (`kvstore.links.announced`)."""
_NAME = "ALLSTEP_SERVER"
_MODULE = "allstep.kvstore.serving.process"


def server_hosts(text: str | None, num_servers: int | None) -> list[Host]:
    """Return the hosts of `--server-hosts`; ConfigError if they do not fit the number of servers.

    A host that has a number of slots is refused: the number of servers is that of `--servers`.
    """
    if text is None:
        return []
    if num_servers is None:
        raise ConfigError(
            f"--server-hosts {text}: the number of servers is missing; give it with --servers N"
        )
    found = parse_hosts(text, f"--server-hosts {text}")
    if any(host.slots != 1 for host in found):
        raise ConfigError(
            f"--server-hosts {text}: expected names of hosts only, such as s1,s2; --servers"
            f" {num_servers} spreads that many servers over them"
        )
    if len(found) > num_servers:
        raise ConfigError(
            f"--servers {num_servers} on {len(found)} hosts ({text}): some would run none; name as"
            f" many hosts as servers at most, or raise --servers to {len(found)}"
        )
    return [host._replace(slots=0) for host in found]


def with_server_hosts(hosts: Sequence[Host], servers: Sequence[Host]) -> list[Host]:
    """Return all hosts of a run: those of workers, then those that only run servers."""
    labels = {host.label for host in hosts}
    return [*hosts, *(host for host in servers if host.label not in labels)]


def servers_of(label: str, places: Sequence[str], num_servers: int) -> tuple[str, ...]:
    """Return the names of the servers of a host. places: the hosts that have servers, in order."""
    return tuple(
        str(number) for number in range(num_servers) if places[number % len(places)] == label
    )


def start_servers(names: Sequence[str], env: Mapping[str, str]) -> None:
    """Start servers of this host, with the environment of its workers.

    Their errors go to the standard error of this process. Raises OSError if one cannot start.
    """
    for name in names:
        subprocess.Popen(
            run_module(_MODULE),
            # Each link has a thread; torch calls of one thread each use the cores best.
            env={**env, _NAME: name, "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
