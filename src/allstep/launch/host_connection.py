"""The launcher's connections to the hosts of a run: the agent, the link to it, and its state."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from allstep.console.escape import print_notice
from allstep.launch.agent import Agent
from allstep.launch.hosts import srun, ssh
from allstep.launch.hosts.host_list import Host, is_here
from allstep.launch.job import Job
from allstep.launch.link import Link
from allstep.launch.messages import TO_AGENT, TO_LAUNCHER, Hello
from allstep.process import stop_signals
from allstep.process.liveness import life_of
from allstep.process.pipe import chunks_now
from allstep.process.python import run_module

# Characters that are kept of ssh's standard error: errors quote its last line.
_MAX_STDERR = 1 << 16
# A killed process that is blocked in the kernel may need long to end.
_DYING_SECONDS = 2.0


@dataclass
class HostConnection:
    """The launcher's connection to one host.

    ranks: the ranks on this host. link: to its agent. pid: the agent, if it is a child of the
    launcher. process: ssh or srun, for another host, or an agent on this machine that was not
    forked. is_here: that agent is on this machine. by_srun: srun has started it. hello: the agent's
    first message, None before it. groups: the process groups of workers on this machine, by rank.
    over: the launcher no longer uses the connection. stderr_tail: the end of standard error of ssh
    or srun. link_ended_at: time of the end of the link, if that was before the hello. has_ended:
    `end` was called.
    """

    host: Host
    ranks: Sequence[int]
    link: Link
    pid: int = 0
    process: subprocess.Popen[bytes] | None = None
    is_here: bool = False
    by_srun: bool = False
    hello: Hello | None = None
    groups: dict[int, int] = field(default_factory=dict)
    over: bool = False
    stderr_tail: str = ""
    link_ended_at: float | None = None
    has_ended: bool = False

    @property
    def remote(self) -> bool:
        """Return whether the agent is on another host."""
        return self.process is not None and not self.is_here

    @property
    def label(self) -> str:
        """Return the name of the host for messages."""
        return self.host.label

    def why_it_did_not_start(self) -> str:
        """Return, in one line, why the link ended before the hello."""
        if not self.remote or self.process is None:
            return f"the agent on {self.label} ended before its hello"
        self.read_stderr()
        describe = srun.describe_failure if self.by_srun else ssh.describe_failure
        code = self.process.poll()
        return describe(self.label, code, self.stderr_tail, self.link.what_came())

    def knows_why_it_ended(self) -> bool:
        """Return whether the reason for the end of the link is known: call again until it is.

        Before the hello it is in the exit code and the last line of ssh, which ends a little later
        than the link. It is waited for 10 ms here, so that the launcher's loop continues, and
        2 s in all.
        """
        if self.hello is not None or not self.remote or self.process is None:
            return True
        self.link_ended_at = self.link_ended_at or time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.01)
            return True
        return time.monotonic() > self.link_ended_at + _DYING_SECONDS

    def why_it_is_over(self) -> str:
        """Return why the link ended, before or after the hello."""
        return self.why_it_did_not_start() if self.hello is None else self.why_it_ended()

    def why_it_ended(self) -> str:
        """Return, as part of a sentence, why the link ended after the hello."""
        if not self.remote:
            return "its agent was killed"
        last = self.last_error()
        return f"the connection to it ended ({last})" if last else "the connection to it ended"

    def last_error(self) -> str:
        """Return the last line on standard error of ssh or srun, or of the agent behind it."""
        self.read_stderr()
        return self.stderr_tail.strip().rpartition("\n")[2]

    def read_stderr(self) -> bool:
        """Read standard error of ssh, and of the agent behind it, and keep its end.

        Return False if the stream has ended.
        """
        if self.process is None or self.process.stderr is None or self.has_ended:
            return False
        for chunk in chunks_now(self.process.stderr.fileno()):
            if not chunk:
                return False
            self.stderr_tail = (self.stderr_tail + chunk.decode(errors="replace"))[-_MAX_STDERR:]
        return True

    def kill_workers_here(self) -> None:
        """Kill the workers on this machine whose agent has ended; they may have survived it.

        Waits until they cannot act any more: a world may be formed without them.
        """
        for group in self.groups.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        end = time.monotonic() + _DYING_SECONDS
        while any(map(_may_act, self.groups.values())) and time.monotonic() < end:
            time.sleep(0.001)

    def end(self) -> None:
        """End the agent, or ssh, and close the connection, once."""
        if self.has_ended:
            return
        self.has_ended = True
        self.link.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        else:
            # Also a lost agent: it may be stopped (SIGSTOP), and waitpid would not return.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            os.close(self.link.read_fd)


def open_connections(job: Job) -> list[HostConnection]:
    """Start an agent on every host of a job; return the connections in order of rank.

    Agents on this machine are forked first, while this process has no threads. With `--srun` each
    agent is a job step, on this machine too.
    """
    first_rank = 0
    here: list[tuple[Host, range]] = []
    elsewhere: list[tuple[Host, range]] = []
    for host in job.hosts:
        ranks = range(first_rank, first_rank + host.slots)
        first_rank += host.slots
        is_child = not job.srun and is_here(host.name)
        (here if is_child else elsewhere).append((host, ranks))
    connections: list[HostConnection] = []
    for host, ranks in here:
        connections.append(
            _fork_agent(host, ranks, [connection.link.read_fd for connection in connections])
        )
    connections += [open_connection(host, ranks, job, here=False) for host, ranks in elsewhere]
    # Hosts that only run servers come last.
    return sorted(connections, key=lambda each: (not each.ranks, *each.ranks[:1]))


def open_connection(host: Host, ranks: Sequence[int], job: Job, *, here: bool) -> HostConnection:
    """Start an agent as a process; it has sent no hello yet.

    here: on this machine, unless `job.srun`. Raises ConfigError if there is no such ssh command.
    """
    here = here and not job.srun
    process = _start_agent_here(host.label) if here else _start_agent(host, job)
    assert process.stdin and process.stdout
    if process.stderr is not None:
        os.set_blocking(process.stderr.fileno(), False)
    link = Link(process.stdout.fileno(), process.stdin.fileno(), TO_LAUNCHER)
    return HostConnection(host, ranks, link, process=process, is_here=here, by_srun=job.srun)


def _start_agent(host: Host, job: Job) -> subprocess.Popen[bytes]:
    """Start the agent of another host by ssh or srun."""
    extra = [job.env[stop_signals.VARIABLE]] if job.env.get(stop_signals.VARIABLE) else []
    if job.srun:
        return srun.start_agent(host.name, srun.forwarded(job.env, job.env_only), *extra)
    return ssh.start_agent(host.name, host.label, job.ssh, *extra)


def _start_agent_here(label: str) -> subprocess.Popen[bytes]:
    # Its standard error is ours, as that of a forked agent is.
    return subprocess.Popen(
        run_module("allstep.launch.agent_main", label, "here"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _fork_agent(host: Host, ranks: range, others: list[int]) -> HostConnection:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _be_agent(theirs, [ours.fileno(), *others], host.label)
    theirs.close()
    fd = ours.detach()
    return HostConnection(host, ranks, Link(fd, fd, TO_LAUNCHER), pid=pid)


def _be_agent(theirs: socket.socket, not_ours: list[int], label: str) -> None:
    """Run the agent in the forked child and exit; never returns.

    not_ours: descriptors of the launcher to close.
    """
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


def _may_act(pid: int) -> bool:
    """Return whether a process still runs its program."""
    try:
        return not life_of(pid).is_ending()
    except OSError:
        return False
