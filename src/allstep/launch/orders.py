"""The `Start` message of each agent: command, environment, addresses. Built after all hellos.

On several hosts, the address of a remote host is the one that ssh connected to, else one of its
interfaces that can be reached. The address of this machine is the one from which it reaches the
others. With `--iface`, both are the address of that interface.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from allstep import machine
from allstep.errors import ConfigError
from allstep.launch.host_connection import HostConnection
from allstep.launch.hosts import srun, ssh
from allstep.launch.hosts.addresses import choose_address
from allstep.launch.job import Job
from allstep.launch.messages import Start, WorkerOrder
from allstep.launch.run_state import span
from allstep.launch.server_processes import COUNT, servers_of
from allstep.limits import Limits
from allstep.world import World


@dataclass(frozen=True)
class Orders:
    """The `Start` messages of one run.

    worlds: by rank. connections: the hosts. token, port: of the launcher's store.
    """

    job: Job
    worlds: Sequence[World]
    connections: Sequence[HostConnection]
    token: str
    port: int
    limits: Limits

    def all(self) -> list[Start]:
        """Return the message for each host; ConfigError if a host has no usable address."""
        addresses = self.addresses()
        return [
            self.order(connection, addresses, [self._worker(rank) for rank in connection.ranks])
            for connection in self.connections
        ]

    def addresses(self) -> list[str]:
        """Return the address of each host; ConfigError if a host has no usable one."""
        return [self._address(connection) for connection in self.connections]

    def banner(self) -> str:
        """Return one line with the ranks, and the servers, of each host."""
        used = [connection for connection in self.connections if connection.ranks]
        where = ", ".join(f"{connection.label} has {span(connection.ranks)}" for connection in used)
        line = f"allstep run: {len(self.worlds)} workers on {len(used)} hosts: {where}"
        if not (number := self.job.num_servers):
            return line
        places = ", ".join(list(dict.fromkeys(self.job.server_places))[:number])
        return f"{line}; {number} server{'s' if number > 1 else ''} on {places}"

    def order(
        self,
        connection: HostConnection,
        addresses: Sequence[str],
        workers: Sequence[WorkerOrder],
        *,
        is_elastic: bool = False,
    ) -> Start:
        """Return the message for one host. addresses: of all hosts. workers: those to start."""
        job, index = self.job, self.connections.index(connection)
        own = addresses[index]
        env = job.env
        if connection.remote:
            env = (srun if job.srun else ssh).forwarded(job.env, job.env_only)
        return Start(
            command=tuple(job.command),
            cwd=job.cwd,
            env={**env, **self._common(addresses, index)},
            workers=tuple(workers),
            servers=self._servers(connection),
            foreground=0 if job.foreground and not connection.remote else None,
            store=tuple((address, self.port) for address in self._store_addresses(connection)),
            token=self.token,
            peers=(
                tuple(address for address in addresses if address != own)
                if len(self.connections) > 1
                else ()
            ),
            iface=job.iface if self._remotes() else None,
            lost=self.limits.lost_for_agent,
            beat=self.limits.beat,
            num_sharing=connection.host.slots,
            is_elastic=is_elastic,
        )

    def _servers(self, connection: HostConnection) -> tuple[str, ...]:
        """Return the names of the parameter servers of a host."""
        job = self.job
        return servers_of(connection.label, job.server_places, job.num_servers)

    def _remotes(self) -> list[HostConnection]:
        return [connection for connection in self.connections if connection.remote]

    def _address(self, connection: HostConnection) -> str:
        """Return the address at which the other hosts reach this one."""
        assert connection.hello is not None
        # Checked on a single host too, where it is not used: the next run may have two hosts.
        address = self._address_of_iface(connection) if self.job.iface else None
        if not self._remotes():
            return "127.0.0.1"
        if address:
            return address
        if self._is_elsewhere(connection):
            hello = connection.hello
            return hello.address or choose_address(
                connection.label, hello.interfaces, machine.interfaces()
            )
        elsewhere = filter(self._is_elsewhere, self.connections)
        sources = (machine.route_to(self._address(other)) for other in elsewhere)
        return next((source for source in sources if source), "127.0.0.1")

    def _is_elsewhere(self, connection: HostConnection) -> bool:
        """Return whether an agent is on another machine; srun may have started it on this one."""
        assert connection.hello is not None
        is_here = connection.hello.interfaces == machine.interfaces()
        return connection.remote and not (is_here and connection.hello.address is None)

    def _address_of_iface(self, connection: HostConnection) -> str:
        """Return the host's address on the interface of `--iface`; ConfigError without one."""
        assert connection.hello is not None and self.job.iface is not None
        found = connection.hello.interfaces.get(self.job.iface)
        if not found:
            host, known = connection.label, ", ".join(connection.hello.interfaces)
            raise ConfigError(
                f"--iface {self.job.iface}: {host} has no such interface with an address; it has"
                f" {known}"
            )
        return found[0]

    def _worker(self, rank: int) -> WorkerOrder:
        world = self.worlds[rank]
        return WorkerOrder(rank, {**world.to_env(), **world.to_horovod_env()})

    def _common(self, addresses: Sequence[str], index: int) -> dict[str, str]:
        """Return the variables that all workers of a host share."""
        assert self.connections[0].hello is not None
        return {
            "MASTER_ADDR": addresses[0],
            "MASTER_PORT": str(self.connections[0].hello.port),
            "GROUP_RANK": str(index),
            "GROUP_WORLD_SIZE": str(sum(bool(each.ranks) for each in self.connections)),
            "ALLSTEP_TOKEN": self.token,
            COUNT: str(self.job.num_servers),
            "PYTHONUNBUFFERED": self.job.env.get("PYTHONUNBUFFERED", "1"),
            "PYTHONFAULTHANDLER": self.job.env.get("PYTHONFAULTHANDLER", "1"),
        }

    def _store_addresses(self, connection: HostConnection) -> list[str]:
        """Return addresses of the store for a host: the one that ssh came from, then the others."""
        if not connection.remote:
            return ["127.0.0.1"]
        assert connection.hello is not None
        asked_for = machine.interfaces().get(self.job.iface, []) if self.job.iface else []
        candidates = [*asked_for, connection.hello.launcher_address, *machine.outside_addresses()]
        return list(dict.fromkeys(address for address in candidates if address))
