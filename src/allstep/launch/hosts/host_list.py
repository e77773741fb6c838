"""Parses lists of hosts, assigns workers to them, and finds which of them is this machine.

The hosts of `-H` and of a hostfile are checked here, before a name is looked up or passed to ssh:

| | accepted |
|---|---|
| host | `name` or `user@name`: letters, digits, `. _ - %`; labels of 1 to 63 characters, max. 253 |
| IPv6 address | in brackets: `[fe80::1%eth0]` |
| slots | 0 to 4,096: `h1:2`; in a hostfile also `h1 slots=2` |
| hostfile | a regular file of at most 1 MB, UTF-8 with or without a byte order mark |
"""

import codecs
import errno
import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from allstep import machine
from allstep.errors import ConfigError
from allstep.files.bounded import read_regular

MAX_SLOTS = 4096
"""Upper limit of workers on one host: more than the cores of any machine, it catches typos."""
MAX_WORKERS = 1 << 20
"""Upper limit of workers of a run."""
_MAX_HOSTFILE = 1 << 20
_MAX_NAME, _MAX_LABEL = 253, 63
_MAX_SHOWN = 60
_NAME = re.compile(r"(?!-)[A-Za-z0-9._%:-]+(?:@(?!-)[A-Za-z0-9._%:-]+)?")
_HOST = re.compile(
    r"""
    (?: (?P<name> [^\s:,=\[\]]+ )
      | (?P<user> (?:[^\s@]+@)? ) \[ (?P<address> [^\s\[\]]+ ) \]
    )
    (?: : (?P<slots> [0-9]+ ) )?
    """,
    re.VERBOSE,
)


class Host(NamedTuple):
    """A host of a run.

    name: as passed to ssh, with or without `user@`. slots: how many workers it may run.
    """

    name: str
    slots: int

    @property
    def label(self) -> str:
        """Return the name without the user, as in messages and `World.host`."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str, source: str | None = None) -> list[Host]:
    """Return the hosts in a text such as `h1:2,h2:4`; a name without a number has one slot.

    source: origin of the text, for errors (default: `-H` and the text). Raises ConfigError.
    """
    where = source or f"-H {_shortened(text)}"
    return _distinct([parse_host(item, where) for item in text.split(",")], where)


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts in a file, one per line; `#` starts a comment.

    A line is `h1 slots=2` (Open MPI, Horovod), `h1:2` (MPICH) or just `h1`. `max_slots=4` is
    accepted and has no effect. Any other text raises ConfigError.
    """
    try:
        data = read_regular(path, _MAX_HOSTFILE)
    except OSError as error:
        # EINVAL: a pipe, such as bash makes of `<(command)`, a device or a folder.
        is_other = error.errno == errno.EINVAL
        advice = "; write the hosts to a file, or give them with -H" if is_other else ""
        raise ConfigError(f"--hostfile {path}: {error.strerror}{advice}") from error
    hosts = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        where = f"{path} line {number}"
        if fields := _text(line, where).partition("#")[0].split():
            hosts.append(_parse_line(fields, where))
    if not hosts:
        raise ConfigError(f"--hostfile {path} names no host")
    return _distinct(hosts, str(path))


def _text(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: byte {error.start + 1} is 0x{line[error.start]:02x}, which is not UTF-8;"
            " save the file as UTF-8"
        ) from None


def _parse_line(fields: list[str], where: str) -> Host:
    """Return the host of a line of a hostfile, split at its blanks."""
    host = parse_host(fields[0], where)
    for field in fields[1:]:
        key, _, value = field.partition("=")
        if key not in ("slots", "max_slots", "max-slots") or not re.fullmatch("[0-9]+", value):
            raise ConfigError(
                f"{where}: {_quoted(field)} is not understood; expected a line like `h1 slots=2`"
            )
        number = _number(value, where)
        if key == "slots":
            host = host._replace(slots=number)
    return host


def parse_host(item: str, where: str, default_slots: int = 1) -> Host:
    """Return the host in a text such as `h1:2`; ConfigError, which begins with `where`."""
    match = _HOST.fullmatch(item.strip())
    if match is None:
        raise ConfigError(
            f"{where}: {_quoted(item)} is not HOST or HOST:NUMBER (put an IPv6 address in brackets)"
        )
    if match["address"]:
        _check_address(match["address"], where)
    name = match["name"] or match["user"] + match["address"]
    _check_name(name, where)
    if match["name"]:
        _check_labels(name.rpartition("@")[2], where)
    return Host(name, _number(match["slots"] or str(default_slots), where))


def _number(digits: str, where: str) -> int:
    """Return a number of slots; ConfigError if it is above MAX_SLOTS."""
    # The length is checked first: Python refuses to convert thousands of digits with its own error.
    if len(digits.lstrip("0")) > len(str(MAX_SLOTS)) or (number := int(digits)) > MAX_SLOTS:
        raise ConfigError(
            f"{where}: {_shortened(digits)} slots; expected at most {MAX_SLOTS:,} on a host"
        )
    return number


def _check_name(name: str, where: str) -> None:
    """Raise ConfigError for a name that is unsafe as an argument of ssh or in messages."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: the host name {_quoted(name)} is not usable: expected letters, digits and ."
            " _ - @ % : only, without a leading -"
        )


def _check_labels(label: str, where: str) -> None:
    """Raise ConfigError for lengths that the domain name system does not allow.

    Python's resolver would raise UnicodeError for them.
    """
    # A name may end with one dot, which means the root.
    parts = label.removesuffix(".").split(".")
    if len(label) > _MAX_NAME or not all(1 <= len(part) <= _MAX_LABEL for part in parts):
        raise ConfigError(
            f"{where}: the host name {_quoted(label)} is not usable: expected at most {_MAX_NAME}"
            f" characters, and 1 to {_MAX_LABEL} between two dots"
        )


def _check_address(address: str, where: str) -> None:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise ConfigError(
            f"{where}: {_quoted(address)} in brackets is not an IPv6 address"
        ) from None


def _quoted(text: str) -> str:
    return (
        repr(text)
        if len(text) <= _MAX_SHOWN
        else f"{text[:_MAX_SHOWN]!r}... ({len(text):,} characters)"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text):,} characters)"


def _distinct(hosts: list[Host], where: str) -> list[Host]:
    """Return `hosts`; ConfigError if one is listed twice."""
    seen: set[str] = set()
    for host in hosts:
        if host.label in seen:
            raise ConfigError(
                f"{where}: host {host.label} is listed twice; give it one entry with all its slots"
            )
        seen.add(host.label)
    return hosts


def assign(hosts: Sequence[Host], num_workers: int | None) -> list[Host]:
    """Return the hosts to use, each with its number of workers as `slots`; filled in order.

    num_workers: default all slots. Raises ConfigError if it is below 1 or above the slots.
    """
    total = sum(host.slots for host in hosts)
    wanted = total if num_workers is None else num_workers
    if wanted < 1:
        raise ConfigError(f"-np {wanted}: at least 1 worker is needed")
    if wanted > total:
        listed = ", ".join(f"{host.label}:{host.slots}" for host in hosts)
        raise ConfigError(
            f"-np {wanted} asks for more workers than the {total} slots listed ({listed}): raise a"
            " host's number, or lower -np"
        )
    used = []
    for host in hosts:
        count = min(host.slots, wanted)
        wanted -= count
        if count:
            used.append(host._replace(slots=count))
    return used


def check_counts(hosts: Sequence[Host]) -> None:
    """Raise ConfigError for numbers of workers that would take hours and all memory to start."""
    for host in hosts:
        if host.slots > MAX_SLOTS:
            raise ConfigError(
                f"{_workers(host.slots)} workers on {host.label}; expected at most {MAX_SLOTS:,}"
                " per host: lower -np"
            )
    if (total := sum(host.slots for host in hosts)) > MAX_WORKERS:
        raise ConfigError(f"{total:,} workers in all; expected at most {MAX_WORKERS:,}: lower -np")


def _workers(number: int) -> str:
    return f"{number:,}" if number < 1 << 64 else "more than 2**64"


def is_here(name: str) -> bool:
    """Return whether workers on a host of this name can be started without ssh.

    The name must resolve to this machine, and its user, if it has one, must be the user of this
    process. A name that only ssh's configuration knows is another host.
    """
    user, _, label = name.rpartition("@")
    if user and user != _current_user():
        return False
    if label in ("localhost", socket.gethostname()):
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(label, None)}
    except OSError:
        return False
    mine = {address for addresses in machine.interfaces().values() for address in addresses}
    return any(address.startswith("127.") or address in mine for address in found)


def _current_user() -> str | None:
    """Return the name of this process's effective user; None for an id without a name."""
    # Not $USER or $LOGNAME: `su` and containers do not update them.
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return None
