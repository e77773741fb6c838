"""Chooses the address at which other hosts reach a host whose agent does not know it.

sshd puts the address at which it was reached into the environment (`SSH_CONNECTION`), and the agent
reports it. With another command in its place (`--srun`, `--ssh "kubectl exec"`, a wrapper, `docker
exec`) the agent can only list the addresses of its interfaces. The launcher then chooses among
these:

1. one to which the host's name resolves on the launcher's host;
2. else the first to which the launcher's host has a route and that it does not have itself, as it
   may have the address of Docker's bridge.
"""

import ipaddress
import socket
from collections.abc import Mapping, Sequence

from allstep import machine
from allstep.errors import ConfigError


def own_addresses(env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the addresses of the launcher and of this host, as far as sshd or Slurm set them."""
    # Address and port of the client, then of this host.
    ssh = env.get("SSH_CONNECTION", "").split()
    by_ssh = len(ssh) == 4 and not env.get("SLURM_STEP_ID")
    return (ssh[0], ssh[2]) if by_ssh else (env.get("SLURM_LAUNCH_NODE_IPADDR"), None)


def choose_address(
    label: str, theirs: Mapping[str, Sequence[str]], ours: Mapping[str, Sequence[str]]
) -> str:
    """Return the address of the host `label`, which has the interfaces `theirs`.

    Args:
        ours: the interfaces of this machine. An agent that has the same ones runs on this machine.

    Raises:
        ConfigError: none of its addresses can be reached from here.
    """
    if theirs == ours:
        return "127.0.0.1"
    outside = [address for name, found in theirs.items() if name != "lo" for address in found]
    own = {address for found in ours.values() for address in found}
    candidates = [
        address for address in outside if address not in own and machine.route_to(address)
    ]
    if not candidates:
        known = ", ".join(outside) or "none"
        raise ConfigError(
            f"{label}: its agent was not started by sshd, and this machine has no route to its"
            f" addresses ({known}); set the interface to use with --iface"
        )
    resolved = _resolve(label)
    # IPv4 first, which Gloo uses on most machines.
    candidates.sort(
        key=lambda address: (address not in resolved, ipaddress.ip_address(address).version)
    )
    return candidates[0]


def _resolve(name: str) -> set[str]:
    """Return the addresses to which this machine resolves a name; empty if it is unknown."""
    try:
        return {
            str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        }
    except (OSError, UnicodeError):
        return set()


def interface_variable(
    name: str, iface: str | None, peers: Sequence[str] | None, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the variable that sets the interface of Gloo or NCCL; empty to leave it unset.

    The interface is that of `--iface`, else the one that routes to the other hosts, `peers`; None
    if these change.
    """
    if iface:
        return {name: iface}
    if name in env or peers is None:
        return {}
    if not peers:
        return {name: "lo"} if name.startswith("GLOO") else {}
    sources = (machine.route_to(address) for address in peers)
    interface = next(
        (found for source in sources if source and (found := machine.interface_of(source))), None
    )
    return {name: interface} if interface else {}


def hold_port() -> socket.socket:
    """Reserve a port for scripts that need one (MASTER_PORT); return the socket that holds it.

    The socket is bound but never listens. So the kernel does not give the port to a process that
    asks for any free one, but does give it to a process that binds it with SO_REUSEADDR, as
    torch's store does.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("0.0.0.0", 0))
    return holder
