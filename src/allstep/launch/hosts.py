"""Which hosts, how many workers on each, and which of them is this machine."""

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from allstep import machine
from allstep.errors import ConfigError

_NAME = re.compile(r"(?!-)[A-Za-z0-9._%:-]+(?:@(?!-)[A-Za-z0-9._%:-]+)?")


class Host(NamedTuple):
    """A host of a run. `name` is what ssh is given (`user@name` is fine); `slots` is how many workers it may take."""

    name: str
    slots: int

    @property
    def label(self) -> str:
        """The name without the user: what messages and World.host say."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[Host]:
    """`h1:2,h2:4` as hosts; a name without a number has one slot."""
    return _distinct([_parse_host(item, f"-H {text}") for item in text.split(",")], f"-H {text}")


def read_hostfile(path: Path) -> list[Host]:
    """One host a line: `h1 slots=2` (Open MPI, Horovod), `h1:2` (MPICH) or just `h1`; `#` starts a comment."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: {error.strerror}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_parse_line(words, f"{path} line {number}"))
    if not hosts:
        raise ConfigError(f"--hostfile {path} names no host")
    return _distinct(hosts, str(path))


def _parse_line(words: list[str], where: str) -> Host:
    host = _parse_host(words[0], where)
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key == "slots" and value.isdigit():
            host = host._replace(slots=int(value))
        elif key not in ("max_slots", "max-slots"):
            raise ConfigError(f"{where}: {word!r} is not understood; a line is like `h1 slots=2`")
    return host


def _parse_host(item: str, where: str) -> Host:
    match = re.fullmatch(
        r"(?:([^\s:,=\[\]]+)|((?:[^\s@]+@)?)\[([0-9a-fA-F:.]+(?:%[\w.-]+)?)\])(?::(\d+))?", item.strip()
    )
    if match is None:
        raise ConfigError(f"{where}: {item!r} is not HOST or HOST:NUMBER (an IPv6 address stands in brackets)")
    name = match[1] or match[2] + match[3]
    _check_name(name, where)
    return Host(name, int(match[4] or 1))


def _check_name(name: str, where: str) -> None:
    """A name becomes an argument of ssh and part of messages: it must look like neither an option nor a command."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: the host name {name!r} is not usable: expected letters, digits and . _ - @ % : only, "
            "without a leading -"
        )


def _distinct(hosts: list[Host], where: str) -> list[Host]:
    seen: set[str] = set()
    for host in hosts:
        if host.label in seen:
            raise ConfigError(f"{where}: host {host.label} is listed twice; give it one entry with all its slots")
        seen.add(host.label)
    return hosts


def assign(hosts: Sequence[Host], num_workers: int | None) -> list[Host]:
    """The hosts that are used, each with the number of workers it gets: filled in the order of the list."""
    total = sum(host.slots for host in hosts)
    wanted = total if num_workers is None else num_workers
    if wanted < 1:
        raise ConfigError(f"-np {wanted}: at least 1 worker is needed")
    if wanted > total:
        listed = ", ".join(f"{host.label}:{host.slots}" for host in hosts)
        raise ConfigError(
            f"-np {wanted} asks for more workers than the {total} slots listed ({listed}): raise a host's number, or lower -np"
        )
    used = []
    for host in hosts:
        count = min(host.slots, wanted)
        wanted -= count
        if count:
            used.append(host._replace(slots=count))
    return used


def is_here(name: str) -> bool:
    """Whether a host name means this machine. A name that only ssh's configuration knows is another host."""
    label = name.rpartition("@")[2]
    if label in ("localhost", socket.gethostname()):
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(label, None)}
    except OSError:
        return False
    mine = {address for addresses in machine.interfaces().values() for address in addresses}
    return any(address.startswith("127.") or address in mine for address in found)
