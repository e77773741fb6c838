"""The launcher: starts an agent on every host, orders their workers, and waits for their ends.

    agents -> hello from each -> start -> lines, lines, ... -> exits -> finish -> report, exit code

One loop serves the links to the agents. It turns messages into events of `run_state`, which
decides, and carries the decisions out. `orders` builds the `Start` message of each agent. Two small
threads serve the store and send signs of life to remote agents.
"""

import contextlib
import functools
import json
import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO

from allstep import wire
from allstep._version import __version__
from allstep.errors import ConfigError, UserError
from allstep.faults import launcher_records as fault_records
from allstep.launch import cause
from allstep.launch.host_connection import HostConnection, open_connections
from allstep.launch.job import Job
from allstep.launch.messages import (
    Alive,
    BadMessage,
    Exit,
    Finish,
    Hello,
    Kill,
    Lines,
    Message,
    Problem,
    Received,
    Signal,
    Started,
)
from allstep.launch.orders import Orders
from allstep.launch.output.sink import wait_for_reader
from allstep.launch.output.writer import Output
from allstep.launch.run_events import (
    Exited,
    Greeted,
    HostSignaled,
    KillAll,
    LeaveHost,
    LinkEnded,
    Refused,
    SendSignal,
    Signaled,
    StateOfRun,
    StoreEnded,
    TracebackStarted,
    WorkerStarted,
)
from allstep.launch.run_state import RESUBMIT, HostRanks, RunState, span
from allstep.launch.signals import caught_signals
from allstep.limits import read_limits
from allstep.wire import keys
from allstep.world import places

__all__ = ["RESUBMIT", "Launcher"]

# Time for agents to clean up and exit at the end.
_FINISH_SECONDS = 5.0


class Launcher:
    """One run of a `job`. `run()` returns its exit code."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.worlds = places([host.label for host in job.hosts for _ in range(host.slots)])
        self.limits = read_limits(job.env)
        self.output = Output(
            len(self.worlds), job.show, job.log_dir, job.stream_dir, job.prefix, job.timestamps
        )
        self.began = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.token = wire.new_token()
        # In an elastic run: those of its workers.
        self.tickets: wire.Tickets | None = None
        # The ranks that records of faults have for those of `HostConnection.ranks`.
        self.fault_ranks: Callable[[Iterable[int]], set[int]] = set
        self.store: wire.Server | None = None
        self.beater: threading.Thread | None = None
        self.ended = threading.Event()
        self.watch([])

    def watch(self, connections: Sequence[HostConnection]) -> None:
        """Use these connections as the hosts of the run, in order of rank."""
        self.connections = connections
        hosts = [
            HostRanks(connection.label, connection.ranks, connection.remote)
            for connection in connections
        ]
        self.state: StateOfRun = RunState(hosts, self.job.grace, self.limits.lost)

    def run(self) -> int:
        """Start the workers, wait for their ends, print the report if they failed.

        Returns the exit code; raises UserError if a host cannot start its workers.
        """
        self.watch(self._open_connections())
        for host, connection in enumerate(self.connections):
            self._listen_to(host, connection)
        with (
            caught_signals(self.job.env) as signals,
            wire.Server(self.token, self._bind_address(), tickets=self.tickets) as self.store,
        ):
            self.selector.register(
                signals, selectors.EVENT_READ, lambda: self._on_signals(signals.recv(64))
            )
            self.output.wait = functools.partial(self._wait_for_reader, signals)
            try:
                self._wait_for_hellos()
                if self.state.may_start:
                    self._start_workers()
                while not self.state.is_over:
                    self._run_once()
            finally:
                self._end_agents()
                self.output.wait = wait_for_reader
            if self.state.started:
                for line in fault_records.missing(self.store, self.job.env):
                    self.output.notify(f"allstep run: {line}")
        self.output.close()
        return self._conclude()

    def _open_connections(self) -> Sequence[HostConnection]:
        """Start an agent on every host of the job."""
        return open_connections(self.job)

    def _listen_to(self, host: int, connection: HostConnection) -> None:
        """Register a link, and the standard error of its ssh, with the selector."""
        self.selector.register(connection.link.read_fd, selectors.EVENT_READ, host)
        if connection.process is not None and connection.process.stderr is not None:
            # A full pipe would stop ssh, and the agent with it.
            read = functools.partial(self._read_stderr, connection, connection.process.stderr)
            self.selector.register(connection.process.stderr, selectors.EVENT_READ, read)
        if connection.remote and self.beater is None:
            self.beater = threading.Thread(target=self._beat, name="allstep-beat", daemon=True)
            self.beater.start()

    def _moment(self) -> float:
        """Return the seconds since the start of the run, which is the time of events."""
        return time.monotonic() - self.began

    # Starting.

    def _bind_address(self) -> str:
        return "" if self._remotes() else "127.0.0.1"

    def _remotes(self) -> list[HostConnection]:
        return [connection for connection in self.connections if connection.remote]

    def _wait_for_hellos(self) -> None:
        """Wait for the hello of every agent."""
        while self.state.may_start and (
            late := [connection for connection in self.connections if connection.hello is None]
        ):
            if (now := self._moment()) > self.limits.start:
                self.state.take(
                    Refused(now, self.connections.index(late[0]), self._late_text(late))
                )
            self._run_once()

    def _late_text(self, late: Sequence[HostConnection]) -> str:
        """Return the error about agents that did not send a hello in time."""
        printed = "".join(
            f"; {connection.label}: {came}"
            for connection in late
            if (came := connection.link.what_came() or connection.last_error())
        )
        return (
            f"no answer from {', '.join(connection.label for connection in late)} within"
            f" {self.limits.start:.0f} s (ALLSTEP_START_TIMEOUT){printed}"
        )

    def _beat(self) -> None:
        """Send signs of life to remote agents, in a thread, until the run ends."""
        while not self.ended.wait(self.limits.beat):
            for connection in self._remotes():
                # A lost host gets no more of them, so that its agent kills what may still run.
                is_in_use = not connection.over and not connection.link.ended
                if is_in_use and not connection.link.outbox:
                    connection.link.send(Alive())

    def _start_workers(self) -> None:
        """Send each agent its order."""
        assert self.store is not None
        self.store.set(keys.HOSTS, json.dumps([world.host for world in self.worlds]).encode())
        orders = Orders(
            self.job, self.worlds, self.connections, self.token, self.store.port, self.limits
        )
        try:
            starts = orders.all()
        except ConfigError as error:
            self.state.take(Refused(self._moment(), 0, str(error)))
            self._decide()
            return
        if self._remotes():
            self.output.notify(orders.banner())
        self.state.start()
        for connection, start in zip(self.connections, starts, strict=True):
            connection.link.send(start)

    # Watching.

    def _run_once(self) -> None:
        """Wait for events, 1 s at most (0.1 s with a deadline pending), and handle them."""
        for key, _ in self.selector.select(0.1 if self.state.has_deadline else 1.0):
            if isinstance(key.data, int):
                self._receive(key.data, self.connections[key.data])
            else:
                key.data()
        assert self.store is not None
        if reason := self.store.failure:
            # Without the store, ranks can neither join nor learn of a failure.
            self.state.take(StoreEnded(self._moment(), reason))
        self._decide()
        for connection in self.connections:
            connection.link.flush()

    def _decide(self) -> None:
        self._carry_out(self.state.decide(self._moment()))

    def _carry_out(self, decisions: Iterable[object]) -> None:
        for decision in decisions:
            match decision:
                case SendSignal():
                    self._send(Signal(decision.number, confirms=False), decision.host)
                case KillAll():
                    self._send(Kill())
                case LeaveHost():
                    self._leave(self.connections[decision.host], lost=decision.lost)

    def _send(self, message: Message, host: int | None = None) -> None:
        """Send a message to one host, or to all; not to those that are over."""
        for number, connection in enumerate(self.connections):
            if not connection.over and host in (None, number):
                connection.link.send(message)

    def _leave(self, connection: HostConnection, *, lost: bool) -> None:
        """Stop using a connection; kill workers on this machine if their agent is lost."""
        connection.over = True
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection.link.read_fd)
        if lost:
            connection.kill_workers_here()

    def _wait_for_reader(self, signals: socket.socket, fd: int) -> bool:
        """Wait until the reader of the launcher's output reads; meanwhile still forward signals.

        Returns False if the run must end: the rest of the output is dropped.
        """
        waiting = select.poll()
        waiting.register(fd, select.POLLOUT)
        waiting.register(signals, select.POLLIN)
        while True:
            found = dict(waiting.poll(100 if self.state.has_deadline else 1000))
            if fd in found:
                return True
            if found:
                self._on_signals(signals.recv(64))
            now = self._moment()
            self._carry_out(self.state.decide_while_blocked(now))
            if self.state.must_end(now):
                return False
            for connection in self.connections:
                connection.link.flush()

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGCHLD:
                self.state.take(Signaled(self._moment(), number))

    def _receive(self, host: int, connection: HostConnection) -> None:
        """Handle the messages that an agent has sent."""
        try:
            for message in connection.link.receive():
                self.state.note_alive(host, self._moment())
                self._take(host, connection, message)
        except BadMessage as bad:
            self.state.take(Refused(self._moment(), host, bad.described(connection.label)))
        connection.read_stderr()
        is_new = connection.link.ended and not connection.over
        if is_new and connection.knows_why_it_ended():
            why = connection.why_it_is_over()
            assert self.store is not None
            if fault := fault_records.last_of(self.store, self.fault_ranks(connection.ranks)):
                why += f" (injected fault: {fault})"
            self.state.take(LinkEnded(self._moment(), host, why))
            # The run state may decide later what follows.
            with contextlib.suppress(KeyError):
                self.selector.unregister(connection.link.read_fd)

    def _read_stderr(self, connection: HostConnection, stream: IO[bytes]) -> None:
        # The event before this one may have closed the connection.
        if not connection.read_stderr() and not connection.has_ended:
            self.selector.unregister(stream)

    def _take(self, host: int, connection: HostConnection, message: Message) -> None:
        """Turn a message of an agent into an event; print `Lines`, which are most messages."""
        if isinstance(message, Lines):
            _check_rank(message, connection)
            self._print(message)
            return
        now = self._moment()
        match message:
            case Hello():
                connection.hello = message
                self.state.take(Greeted(now, host))
            case Started():
                _check_rank(message, connection)
                if not connection.remote:
                    connection.groups[message.rank] = message.pid
                self.state.take(WorkerStarted(now, host))
            case Exit():
                _check_rank(message, connection)
                self.state.take(self._exited(now, message))
            case Received():
                self.state.take(HostSignaled(now, host, message.number))
            case Problem():
                self.state.take(Refused(now, host, f"{message.text} (on {connection.label})"))

    def _exited(self, now: float, message: Exit) -> Exited:
        """Return the event of an exit, with the end of standard error and the failure record."""
        assert self.store is not None
        rank, errors = message.rank, tuple(self.output.errors[message.rank])
        record = self.store.peek(keys.failure_of(rank)) if message.code else None
        fault = fault_records.last_of(self.store, {rank})
        return Exited(
            now, rank, message.code, errors, message.out_of_memory, cause.blamed_by(record), fault
        )

    def _print(self, message: Lines) -> None:
        errors = self.output.write(message.rank, message.stream, message.lines)
        if any(map(cause.starts_traceback, errors)):
            self.state.take(TracebackStarted(self._moment(), message.rank))

    # Ending.

    def _end_agents(self) -> None:
        """Ask the agents to clean up and exit, print their last lines, and kill them after 5 s."""
        self._send(Finish())
        end = time.monotonic() + _FINISH_SECONDS
        while time.monotonic() < end and any(
            each.hello and not each.over and not each.link.ended for each in self.connections
        ):
            for key, _ in self.selector.select(0.1):
                if isinstance(key.data, int):
                    self._receive_last(self.connections[key.data])
        self.ended.set()
        if self.beater is not None:
            # It must not write to descriptors that are closed now and may be reused.
            self.beater.join()
        for connection in self.connections:
            connection.end()

    def _receive_last(self, connection: HostConnection) -> None:
        """Print the last lines of a host after the end of the run; ignore its other messages."""
        with contextlib.suppress(BadMessage):
            for message in connection.link.receive():
                if isinstance(message, Lines):
                    _check_rank(message, connection)
                    self._print(message)
                elif isinstance(message, Hello):
                    connection.hello = message
        connection.read_stderr()
        if connection.link.ended:
            self._leave(connection, lost=False)

    def _conclude(self) -> int:
        """Print the report and return the exit code; UserError for a problem of a host."""
        if self.state.problem:
            raise UserError(self.state.problem)
        end = self.state.conclusion(
            self._moment(), self.output.shows, foreground=self.job.foreground
        )
        if end.text:
            self.output.notify(end.text)
        return end.code


def _check_rank(message: Lines | Started | Exit, connection: HostConnection) -> None:
    """Raise BadMessage if the message is about a rank of another host."""
    if message.rank not in connection.ranks:
        what = (
            f"sent message {message.kind!r} with field 'rank': found {message.rank}, expected"
            f" {span(connection.ranks)}"
        )
        raise BadMessage(what, message.kind, "rank", __version__)
