"""What each agent is told to start: command, environment, addresses. Made when all have greeted.

Addresses, on several hosts: a remote host is known by the address at which ssh found it, else by
one of its interfaces that can be reached; this machine by the address from which it reaches the
others; both by the address of `--iface` if it was given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from allstep import machine
from allstep.errors import ConfigError
from allstep.launch import horovod
from allstep.launch.host_connection import Station
from allstep.launch.hosts import ssh
from allstep.launch.hosts.addresses import choose_address
from allstep.launch.job import Job
from allstep.launch.messages import Start, WorkerOrder
from allstep.launch.run_state import span
from allstep.limits import Limits
from allstep.world import World


@dataclass(frozen=True)
class Orders:
    """The orders of one run. worlds: by rank. token, port: of the launcher's store."""

    job: Job
    worlds: Sequence[World]
    stations: Sequence[Station]
    token: str
    port: int
    limits: Limits

    def all(self) -> list[Start]:
        """Return the order of each station; ConfigError when a host has no address to use."""
        addresses = [self._address(station) for station in self.stations]
        return [self.order(station, addresses) for station in self.stations]

    def banner(self) -> str:
        """Return the line that shows which host has which ranks."""
        where = ", ".join(f"{station.label} has {span(station.ranks)}" for station in self.stations)
        return f"allstep run: {len(self.worlds)} workers on {len(self.stations)} hosts: {where}"

    def order(self, station: Station, addresses: Sequence[str]) -> Start:
        """Return the order of one station. addresses: of all stations."""
        job, index = self.job, self.stations.index(station)
        own = addresses[index]
        env = ssh.forwarded(job.env, job.env_only) if station.remote else job.env
        return Start(
            command=tuple(job.command),
            cwd=job.cwd,
            env={**env, **self._common(addresses, index)},
            workers=tuple(WorkerOrder(rank, self._place(rank)) for rank in station.ranks),
            foreground=0 if job.foreground and not station.remote else None,
            store=tuple((address, self.port) for address in self._store_addresses(station)),
            token=self.token,
            peers=(
                tuple(address for address in addresses if address != own)
                if len(self.stations) > 1
                else ()
            ),
            iface=job.iface if self._remotes() else None,
            lost=self.limits.lost_for_agent,
            beat=self.limits.beat,
        )

    def _remotes(self) -> list[Station]:
        return [station for station in self.stations if station.remote]

    def _address(self, station: Station) -> str:
        """Return the address at which the other hosts reach this one."""
        assert station.hello is not None
        # Checked on a single host, too, where it is not used: the next run may have two.
        address = self._address_of_iface(station) if self.job.iface else None
        if not self._remotes():
            return "127.0.0.1"
        if address:
            return address
        if station.remote:
            hello = station.hello
            return hello.address or choose_address(
                station.label, hello.interfaces, machine.interfaces()
            )
        sources = (machine.route_to(self._address(other)) for other in self._remotes())
        return next((source for source in sources if source), "127.0.0.1")

    def _address_of_iface(self, station: Station) -> str:
        assert station.hello is not None and self.job.iface is not None
        found = station.hello.interfaces.get(self.job.iface)
        if not found:
            known = ", ".join(station.hello.interfaces)
            raise ConfigError(
                f"--iface {self.job.iface}: {station.label} has no such interface with an address;"
                f" it has {known}"
            )
        return found[0]

    def _place(self, rank: int) -> dict[str, str]:
        return {**self.worlds[rank].to_env(), **horovod.place_variables(self.worlds[rank])}

    def _common(self, addresses: Sequence[str], index: int) -> dict[str, str]:
        """Return the variables that all workers of a host get."""
        assert self.stations[0].hello is not None
        return {
            "MASTER_ADDR": addresses[0],
            "MASTER_PORT": str(self.stations[0].hello.port),
            "GROUP_RANK": str(index),
            "GROUP_WORLD_SIZE": str(len(self.stations)),
            "ALLSTEP_TOKEN": self.token,
            "PYTHONUNBUFFERED": self.job.env.get("PYTHONUNBUFFERED", "1"),
            "PYTHONFAULTHANDLER": self.job.env.get("PYTHONFAULTHANDLER", "1"),
        }

    def _store_addresses(self, station: Station) -> list[str]:
        """Return where a station may find the store: the address ssh came from, then all others."""
        if not station.remote:
            return ["127.0.0.1"]
        assert station.hello is not None
        asked_for = machine.interfaces().get(self.job.iface, []) if self.job.iface else []
        candidates = [*asked_for, station.hello.launcher_address, *machine.outside_addresses()]
        return list(dict.fromkeys(address for address in candidates if address))
