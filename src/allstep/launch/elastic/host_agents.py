"""The agents of the hosts of an elastic run: started when a worker needs one, ended with the host.

A host is named by its label, as it is listed: `localhost` and `127.0.0.1` are two hosts. It has one
living connection at most. A host that returns gets a new agent, with a new number.

```
            a worker is to start          hello: the orders of its workers are sent
  no agent ----------------------> starts ------------------------------> serves
     ^                               |                                      |
     +--- no hello within 30 s ------+      lost; or not listed any more, and without workers
     +----------------------------------------------------------------------+
```
"""

import contextlib
import selectors
from collections.abc import Sequence
from functools import partial

from allstep.launch.elastic.host_poll import FoundHosts
from allstep.launch.host_connection import HostConnection, open_connection
from allstep.launch.hosts.host_list import Host
from allstep.launch.job import Job
from allstep.launch.messages import BadMessage, Finish


class HostAgents:
    """The hosts that are listed now, and the connections to all that ever were.

    connections: in the order of their numbers; grows. found: the hosts that are listed.
    """

    def __init__(
        self,
        found: FoundHosts,
        connections: Sequence[HostConnection],
        job: Job,
        selector: selectors.BaseSelector,
    ) -> None:
        self.connections = list(connections)
        self.found = found
        self._listed = {host.label: host for host in found.hosts}
        self._job = job
        self._selector = selector
        self._opened_at = dict.fromkeys(range(len(connections)), 0.0)

    @property
    def slots(self) -> list[tuple[str, int]]:
        """Return label and number of slots of each listed host."""
        return [(host.label, host.slots) for host in self._listed.values()]

    def list_hosts(self, found: FoundHosts) -> str:
        """Replace the listed hosts; return the change as text."""
        before, now = set(self._listed.values()), set(found.hosts)
        self._listed = {host.label: host for host in found.hosts}
        self.found = found
        for connection in self.connections:
            connection.host = self._listed.get(connection.label, connection.host)
        parts = (("found", now - before), ("withdrawn", before - now))
        return "; ".join(f"{name} {_names(hosts)}" for name, hosts in parts if hosts)

    def living(self, label: str) -> HostConnection | None:
        """Return the connection to a host that is in use; None if there is none."""
        found = (each for each in reversed(self.connections) if each.label == label)
        return next((each for each in found if not each.over), None)

    def open(self, label: str, now: float) -> tuple[int, HostConnection]:
        """Start an agent on a host; return its number and the connection, without a hello yet.

        Raises ConfigError if there is no such ssh command.
        """
        host = self._listed[label]
        connection = open_connection(host, [], self._job, here=label in self.found.here)
        self.connections.append(connection)
        number = len(self.connections) - 1
        self._opened_at[number] = now
        return number, connection

    def late(self, now: float, limit: float) -> list[int]:
        """Return the numbers of agents that have sent no hello within `limit` seconds."""
        return [
            number
            for number, connection in enumerate(self.connections)
            if connection.hello is None
            and not connection.over
            and now - self._opened_at[number] > limit
        ]

    def release_unlisted(self, busy: set[str]) -> None:
        """End the agents of hosts that are not listed any more. busy: hosts with workers."""
        for connection in self.connections:
            if connection.over or connection.label in self._listed or connection.label in busy:
                continue
            connection.link.send(Finish())
            connection.over = True
            self._selector.unregister(connection.link.read_fd)
            discard = partial(self._discard, connection)
            self._selector.register(connection.link.read_fd, selectors.EVENT_READ, discard)

    def _discard(self, connection: HostConnection) -> None:
        """Read what a released agent sends until it has ended."""
        with contextlib.suppress(BadMessage):
            list(connection.link.receive())
        if connection.link.ended:
            self.close(connection)

    def close(self, connection: HostConnection) -> None:
        """Close a connection that is over."""
        # Its descriptors may have been used again since.
        if connection.has_ended:
            return
        streams = [connection.link.read_fd]
        if connection.process is not None and connection.process.stderr is not None:
            streams.append(connection.process.stderr.fileno())
        for fd in streams:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
        connection.end()

    def close_ended(self) -> None:
        """Close the connections that are over: at the end of a run they need not be waited for."""
        for connection in self.connections:
            if connection.over:
                self.close(connection)


def _names(hosts: set[Host]) -> str:
    return ", ".join(sorted(f"{host.label}:{host.slots}" for host in hosts))
