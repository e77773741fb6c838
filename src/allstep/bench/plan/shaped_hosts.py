"""Hosts with shaped links on one machine: network namespaces on a switch, each link a token bucket.

```
switch (a bridge in a namespace of its own) --- port0 ~~~ eth0  host 0, 10.77.0.1
                                            '-- port1 ~~~ eth0  host 1, 10.77.0.2
                                                ~~~ tc tbf in both directions
```

A namespace lives as long as the process that holds it. The holders read a pipe from this process,
so nothing survives the bench, not even one killed with -9. Hosts share files, cores and Unix
sockets with the machine, which is how the bench talks to their ranks.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence

from allstep.errors import ConfigError

_PROGRAMS = ("ip", "tc", "unshare", "nsenter")
_SUBNET = "10.77.0"
_HOLD = "ip link set lo up && echo ready && exec cat"
_QUEUE = "400ms"
"""Longest time of a packet in the queue of a link; a longer queue drops packets."""


def check_possible() -> None:
    """Raise ConfigError if this process cannot make hosts."""
    if os.geteuid() != 0:
        raise ConfigError(
            "allstep bench plan: the hosts of this bench are network namespaces, which only root"
            " can make; expected user 0, found"
            f" {os.geteuid()}: run it with sudo, or in a container as root"
        )
    if missing := [each for each in _PROGRAMS if not shutil.which(each, path=_search_path())]:
        raise ConfigError(
            f"allstep bench plan: expected the programs {', '.join(_PROGRAMS)}, found no"
            f" {', '.join(missing)}: install iproute2 and util-linux"
        )


class ShapedHosts:
    """Hosts, counted from 0. A context: they end with it."""

    def __init__(self, count: int) -> None:
        check_possible()
        self._holders: list[subprocess.Popen[str]] = []
        try:
            self._build(count)
        except BaseException:
            self.close()
            raise

    def _build(self, count: int) -> None:
        switch = self._hold()
        self._switch, self._hosts = switch, [self._hold() for _ in range(count)]
        commands = ["ip link add switch type bridge", "ip link set switch up"]
        for k, host in enumerate(self._hosts):
            commands += [
                f"ip link add port{k} type veth peer name eth0 netns {host}",
                f"ip link set port{k} master switch up",
            ]
        _run(self.prefix_of(switch), commands)
        for k, host in enumerate(self._hosts):
            address = f"ip addr add {self.address(k)}/24 dev eth0"
            _run(self.prefix_of(host), [address, "ip link set eth0 up"])

    def _hold(self) -> int:
        """Start the holder of a new namespace and return its process id."""
        holder = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", _HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(),
            # Ctrl-C must reach only the bench, which then closes the pipes.
            start_new_session=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        answer = holder.stdout.readline().strip()
        if answer != "ready":
            raise ConfigError(
                "allstep bench plan: this system does not let us make a network namespace:"
                f" {answer or 'no reason given'}; run it on a host, or in a privileged container"
            )
        return holder.pid

    @staticmethod
    def prefix_of(holder: int) -> list[str]:
        """Return what goes before a command to run it in the namespace of a holder."""
        return ["nsenter", f"--net=/proc/{holder}/ns/net", "--"]

    def prefix(self, k: int) -> list[str]:
        """Return what goes before a command to run it on host k."""
        return self.prefix_of(self._hosts[k])

    def address(self, k: int) -> str:
        """Return the address of host k."""
        return f"{_SUBNET}.{k + 1}"

    def shape(self, mbit: int, burst: int) -> None:
        """Limit every link to `mbit` Mbit/s in each direction, after `burst` bytes at once."""
        rule = f"root tbf rate {mbit}mbit burst {burst} latency {_QUEUE}"
        ports = [f"tc qdisc replace dev port{k} {rule}" for k in range(len(self._hosts))]
        _run(self.prefix_of(self._switch), ports)
        for k in range(len(self._hosts)):
            _run(self.prefix(k), [f"tc qdisc replace dev eth0 {rule}"])

    def close(self) -> None:
        """End the holders, and with them the namespaces and their links."""
        for holder in self._holders:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.close()
            holder.stdout.close()
        for holder in self._holders:
            holder.wait()
        self._holders.clear()

    def __enter__(self) -> "ShapedHosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(prefix: Sequence[str], commands: Sequence[str]) -> None:
    """Run commands of a shell one after the other; raise ConfigError if one fails."""
    script = " && ".join(commands)
    done = subprocess.run(
        [*prefix, "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=_environment(),
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"allstep bench plan: links between hosts cannot be made: {reason}; it needs a kernel"
            " with bridges, veth and tbf"
        )


def _search_path() -> str:
    """PATH and the folders of system programs, which users often lack."""
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _search_path()}
