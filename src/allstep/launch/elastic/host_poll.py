"""Polls the discovery script of an elastic run in a thread: the launcher's loop never waits.

The launcher has polled once before; this thread reports what changes after that:

| the script | reported |
|---|---|
| prints another list | the list, with the hosts that are this machine |
| fails, or prints an invalid line | the error, once until it succeeds; the last list counts |
| prints the same list again | nothing |

Names are resolved here too: a name server may take seconds.
"""

import queue
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.errors import ConfigError
from allstep.launch.hosts.discovery import Discovery, Stopped
from allstep.launch.hosts.host_list import Host, is_here


@dataclass(frozen=True)
class FoundHosts:
    """A list of hosts. here: the labels of those that are this machine."""

    hosts: tuple[Host, ...]
    here: frozenset[str]

    @classmethod
    def of(cls, hosts: Sequence[Host]) -> "FoundHosts":
        """Return a list of hosts, after their names were resolved."""
        return cls(tuple(hosts), frozenset(host.label for host in hosts if is_here(host.name)))


class HostPoll:
    """Polls a script until `close`. last: the hosts of the first poll."""

    def __init__(self, discovery: Discovery, last: FoundHosts) -> None:
        self._discovery = discovery
        self._last = last
        self._has_failed = False
        self._news: queue.SimpleQueue[FoundHosts | str] = queue.SimpleQueue()
        self._wake_out, self._wake_in = socket.socketpair()
        self._stop_out, self._stop_in = socket.socketpair()
        self._stop_in.settimeout(discovery.seconds)
        self._thread = threading.Thread(target=self._run, name="allstep-hosts", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to `take`."""
        return self._wake_in.fileno()

    def take(self) -> FoundHosts | str:
        """Return the next list or error; blocks until there is one."""
        # There is one byte for each of them.
        self._wake_in.recv(1)
        return self._news.get()

    def close(self) -> None:
        """Kill the script if it runs, and end the thread."""
        self._stop_out.close()
        self._thread.join()
        for each in (self._wake_out, self._wake_in, self._stop_in):
            each.close()

    def _run(self) -> None:
        while not self._is_stopped():
            try:
                hosts = self._discovery.poll(self._stop_in.fileno())
            except Stopped:
                return
            # OSError: no process can be started at the moment.
            except (ConfigError, OSError) as error:
                if not self._has_failed:
                    self._report(str(error))
                self._has_failed = True
                continue
            self._has_failed = False
            if set(hosts) != set(self._last.hosts):
                self._last = FoundHosts.of(hosts)
                self._report(self._last)

    def _is_stopped(self) -> bool:
        """Wait for the time of the next poll; return whether there is none."""
        try:
            return self._stop_in.recv(1) == b""
        except TimeoutError:
            return False

    def _report(self, found: FoundHosts | str) -> None:
        self._news.put(found)
        self._wake_out.send(b"\0")
