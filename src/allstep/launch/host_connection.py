"""The hosts of a run as the launcher sees them: an agent each, a link to it, and what is known of
it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from allstep.console.escape import print_notice
from allstep.launch.agent import Agent
from allstep.launch.hosts import ssh
from allstep.launch.hosts.parse import Host, is_here
from allstep.launch.link import Link
from allstep.launch.messages import TO_AGENT, TO_LAUNCHER, Hello
from allstep.process.pipe import chunks_now

# Characters that are kept of what ssh says: its last lines are quoted.
_MAX_COMPLAINTS = 1 << 16


@dataclass
class Station:
    """A host as the launcher sees it."""

    host: Host
    ranks: Sequence[int]
    link: Link
    pid: int = 0  # the agent here, a child of ours
    process: subprocess.Popen[bytes] | None = None  # ssh, for another host
    hello: Hello | None = None
    groups: list[int] = field(default_factory=list)  # the workers' process groups, on this machine
    over: bool = False
    complaints: str = ""

    @property
    def remote(self) -> bool:
        return self.process is not None

    @property
    def label(self) -> str:
        return self.host.label

    def why_it_did_not_start(self) -> str:
        """One line, when the link ended before the hello."""
        if self.process is None:
            return f"the agent on {self.label} ended before it said hello"
        code = _wait(self.process)
        self.hear_complaints()
        return ssh.complaint(self.label, code, self.complaints, self.link.what_came())

    def why_it_ended(self) -> str:
        """A few words, when the link ended after the hello."""
        if self.process is None:
            return "its agent was killed"
        self.hear_complaints()
        last = self.complaints.strip().rpartition("\n")[2]
        return f"the connection to it ended ({last})" if last else "the connection to it ended"

    def hear_complaints(self) -> bool:
        """Keep the end of what ssh, or a crash of the agent behind it, says on standard error.

        False when nothing more can come.
        """
        if self.process is None or self.process.stderr is None:
            return False
        for chunk in chunks_now(self.process.stderr.fileno()):
            if not chunk:
                return False
            self.complaints = (self.complaints + chunk.decode(errors="replace"))[-_MAX_COMPLAINTS:]
        return True

    def kill_workers_here(self) -> None:
        """For an agent on this machine that is gone; what it started may not be."""
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def end(self) -> None:
        """No agent of ours, and no ssh, stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        else:
            # Also one that is lost: it may be stopped, and its end would be waited for without end.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            os.close(self.link.read_fd)


def open_stations(hosts: Sequence[Host], ssh_command: str) -> list[Station]:
    """Start an agent on every host, in order of rank.

    Those here are forked first, while this process has no thread.
    """
    first_rank = 0
    here: list[tuple[Host, range]] = []
    elsewhere: list[tuple[Host, range]] = []
    for host in hosts:
        ranks = range(first_rank, first_rank + host.slots)
        first_rank += host.slots
        (here if is_here(host.name) else elsewhere).append((host, ranks))
    stations: list[Station] = []
    for host, ranks in here:
        stations.append(_fork_agent(host, ranks, [station.link.read_fd for station in stations]))
    for host, ranks in elsewhere:
        process = ssh.start_agent(host.name, host.label, ssh_command)
        assert process.stdin and process.stdout and process.stderr
        os.set_blocking(process.stderr.fileno(), False)
        link = Link(process.stdout.fileno(), process.stdin.fileno(), TO_LAUNCHER)
        stations.append(Station(host, ranks, link, process=process))
    return sorted(stations, key=lambda station: station.ranks[0])


def _fork_agent(host: Host, ranks: range, others: list[int]) -> Station:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _be_agent(theirs, [ours.fileno(), *others], host.label)
    theirs.close()
    fd = ours.detach()
    return Station(host, ranks, Link(fd, fd, TO_LAUNCHER), pid=pid)


def _be_agent(theirs: socket.socket, not_ours: list[int], label: str) -> None:
    """Runs in the forked child; never returns."""
    code = 1
    try:
        for fd in not_ours:
            os.close(fd)
        os.setsid()
        fd = theirs.fileno()
        Agent(Link(fd, fd, TO_AGENT), label, remote=False).run()
        code = 0
    except OSError as error:
        print_notice(f"the agent on {label} cannot start: {error.strerror or error}", "allstep run")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        return None
