"""Real hosts on one machine, for tests: network namespaces on a switch, with a real sshd in each.

```
 this machine ---- switch (a bridge in a namespace of its own) ---- h1  198.18.x.1
  198.18.x.254                                                 \\--- h2  198.18.x.2
```

A host has its own network, host name and /etc/hosts; it shares processes, files and cores with the
machine. Names resolve only inside the hosts, and there, as on many a Debian machine, a host's own
name is 127.0.1.1: what works here does not lean on host names. The addresses are of the range kept
for tests (RFC 2544), which no real network uses. Nothing outside /tmp is written, and nothing
survives the test run, not even one killed with -9 (see `support.supervisor`).

`two_hosts` gives two of them, `three_hosts` three others. `ssh -F two_hosts.ssh_config h1` works from this machine and from
within the hosts.
"""

import functools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.supervisor import Supervisor

PROGRAMS = ("ip", "nsenter", "unshare", "mount")


@functools.cache
def why_not(*programs: str) -> str | None:
    """The reason why no hosts can be made here, or None."""
    if os.geteuid() != 0:
        return "needs root: hosts are network namespaces"
    missing = [
        program
        for program in (*PROGRAMS, *programs)
        if not shutil.which(program, path=system_path())
    ]
    if missing:
        return f"needs {', '.join(missing)}"
    links = "ip link add switch type bridge && ip link add one type veth peer name other"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", links], capture_output=True, text=True
    )
    return (
        f"needs a kernel that lets us make hosts: {tried.stderr.strip()}"
        if tried.returncode
        else None
    )


def system_path() -> str:
    """PATH and the folders of daemons, which users often lack."""
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class Hosts:
    """Hosts on a switch. Hosts are counted from 0."""

    def __init__(self, names: Sequence[str], *, own_name_is_loopback: bool = True) -> None:
        self.names = list(names)
        self.supervisor = Supervisor()
        self.folder = self.supervisor.folder
        self.own = self.folder / "own"  # the one folder that hosts do not share
        try:
            self._build(own_name_is_loopback)
        except BaseException:
            self.supervisor.close()
            raise

    def _build(self, own_name_is_loopback: bool) -> None:
        self._switch = self.supervisor.host("ip link add switch type bridge; ip link set switch up")
        subnet = self._plug_in_this_machine()
        self.addresses = [f"{subnet}.{k + 1}" for k in range(len(self.names))]
        self.gateway = f"{subnet}.254"  # this machine, as the hosts see it
        self._holders = [self._add_host(k, own_name_is_loopback) for k in range(len(self.names))]

    def _plug_in_this_machine(self) -> str:
        """Takes a subnet that no other run has: the name of our end of the cable is the lock on it."""
        start = os.getpid() % 256
        for number in [*range(start, 256), *range(start)]:
            ours = f"allstep{number}"
            cable = [
                "ip",
                "link",
                "add",
                ours,
                "type",
                "veth",
                "peer",
                "name",
                "machine",
                "netns",
                str(self._switch),
            ]
            if subprocess.run(cable, capture_output=True).returncode == 0:
                self._cable = ours
                _run("ip", "addr", "add", f"198.18.{number}.254/24", "dev", ours)
                _run("ip", "link", "set", ours, "up")
                _run(*self._on_switch(), "ip", "link", "set", "machine", "master", "switch", "up")
                return f"198.18.{number}"
        raise OSError(
            "no network can be made:"
            f" {subprocess.run(cable, capture_output=True, text=True).stderr.strip()}"
        )

    def _add_host(self, k: int, own_name_is_loopback: bool) -> int:
        name, table, shadow = self.names[k], self.folder / f"hosts.{k}", self.folder / f"shadow.{k}"
        own, cgroup = self.folder / f"own.{k}", self.folder / f"cgroup.{k}"
        entries = dict(zip(self.names, self.addresses, strict=True))
        if own_name_is_loopback:
            entries[name] = "127.0.1.1"
        table.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {n}\n" for n, address in entries.items())
        )
        shadow.write_text(
            "root:*:::::::\n"
        )  # sshd turns away a locked account, as root's is on many machines
        cgroup.mkdir()
        own.mkdir()
        self.own.mkdir(exist_ok=True)
        # A new /sys shows the host's own network, but lacks the control groups: they are carried
        # over.
        holder = self.supervisor.host(f"""
            hostname {name}
            mount --bind {table} /etc/hosts
            mount --bind {shadow} /etc/shadow
            mount --bind {own} {self.own}
            mount --rbind /sys/fs/cgroup {cgroup}
            mount -t sysfs sysfs /sys
            mount --move {cgroup} /sys/fs/cgroup
            ip link set lo up""")
        _run(
            *self._on_switch(),
            "ip",
            "link",
            "add",
            f"port{k}",
            "type",
            "veth",
            "peer",
            "eth0",
            "netns",
            str(holder),
        )
        _run(*self._on_switch(), "ip", "link", "set", f"port{k}", "master", "switch", "up")
        inside = ["nsenter", f"--net=/proc/{holder}/ns/net"]
        _run(*inside, "ip", "addr", "add", f"{self.addresses[k]}/24", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        return holder

    def _on_switch(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._switch}/ns/net"]

    def prefix(self, k: int) -> list[str]:
        """Goes before a command to run it on host k:

        `subprocess.Popen([*hosts.prefix(0), "hostname"])` has the command's own pid.
        """
        # A new mount namespace comes with another working folder; the shell knows ours.
        enter = f'exec nsenter -t {self._holders[k]} --net --uts --mount --wd="$PWD" -- "$@"'
        return ["sh", "-c", enter, self.names[k]]

    def exec(self, k: int, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on host k and returns what it printed."""
        options = {"capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run([*self.prefix(k), *command], **options)

    def start(self, k: int, *command: str, log: str, env: dict[str, str] | None = None) -> int:
        """Starts a daemon on host k, its output in `log`."""
        return self.supervisor.start([*self.prefix(k), *command], log, env)

    def cut(self, k: int) -> None:
        """Pulls host k's plug at the switch: nobody is told, packets are just lost."""
        _run(*self._on_switch(), "ip", "link", "set", f"port{k}", "nomaster")

    def mend(self, k: int) -> None:
        _run(*self._on_switch(), "ip", "link", "set", f"port{k}", "master", "switch", "up")

    def close(self) -> None:
        subprocess.run(
            ["ip", "link", "del", self._cable], capture_output=True
        )  # the kernel would, a moment later
        self.supervisor.close()


class SshHosts(Hosts):
    """Hosts with an sshd on port 22 and keys that live as long as they do."""

    def __init__(self, names: Sequence[str], *, own_name_is_loopback: bool = True) -> None:
        super().__init__(names, own_name_is_loopback=own_name_is_loopback)
        self.ssh_config = self.folder / "ssh_config"
        self.ssh = f"ssh -F {self.ssh_config}"
        try:
            self._configure()
            self._start_sshds()
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        for key in ("host_key", "user_key"):
            _run(
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-C",
                "allstep test",
                "-f",
                str(self.folder / key),
            )
        host_key = (self.folder / "host_key.pub").read_text().strip()
        (self.folder / "known_hosts").write_text(
            "".join(f"{a} {host_key}\n" for a in self.addresses)
        )
        (self.folder / "sshd_config").write_text(f"""\
Port 22
HostKey {self.folder}/host_key
AuthorizedKeysFile {self.folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
PrintMotd no
PrintLastLog no
""")
        self.ssh_config.write_text(
            "".join(
                f"Host {n}\n  HostName {a}\n"
                for n, a in zip(self.names, self.addresses, strict=True)
            )
            + f"""\
Host {" ".join(self.names)}
  User root
  IdentityFile {self.folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {self.folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""
        )

    def _start_sshds(self) -> None:
        Path("/run/sshd").mkdir(
            mode=0o755, exist_ok=True
        )  # sshd insists on it; Debian's own service makes it too
        sshd = shutil.which("sshd", path=system_path())
        assert sshd
        for k in range(len(self.names)):
            self.start(
                k, sshd, "-D", "-e", "-f", str(self.folder / "sshd_config"), log=f"sshd.{k}.log"
            )
        for k, address in enumerate(self.addresses):
            if not reachable(address, 22, within=40):
                raise OSError(
                    f"sshd on {self.names[k]} does not answer:\n{self.supervisor.log(f'sshd.{k}.log')}"
                )


def reachable(address: str, port: int, within: float) -> bool:
    """Whether a TCP connection can be made within so many seconds."""
    end = time.monotonic() + within
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, port), timeout=left):
                return True
        except OSError:
            time.sleep(min(0.02, left))
    return False


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture(scope="session")
def two_hosts(namespaces: None) -> Iterator[SshHosts]:
    """Hosts h1 and h2 with an sshd each."""
    yield from _hosts("h1", "h2")


@pytest.fixture(scope="module")
def three_hosts(namespaces: None) -> Iterator[SshHosts]:
    """Hosts h1, h2 and h3 with an sshd each, on a switch of their own."""
    yield from _hosts("h1", "h2", "h3")


def _hosts(*names: str) -> Iterator[SshHosts]:
    if reason := why_not("ssh", "sshd", "ssh-keygen"):
        pytest.skip(reason)
    hosts = SshHosts(names)
    yield hosts
    hosts.close()
