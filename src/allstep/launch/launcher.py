"""The launcher: starts an agent on every host, gives each its workers, watches until all have
ended.

    agents -> hello from each -> start -> lines, lines, ... -> exits -> finish -> report, exit code

Everything happens in one loop over the links to the agents. It turns what comes into events of
`run_state`, which decides, and carries the decisions out. `orders` makes what agents are to start.
Two small threads serve the store and send signs of life to remote agents.
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
from collections.abc import Iterable, Sequence
from typing import IO

from allstep import wire
from allstep._version import __version__
from allstep.errors import ConfigError, UserError
from allstep.launch import cause
from allstep.launch.host_connection import Station, open_stations
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
    Signal,
    Started,
)
from allstep.launch.orders import Orders
from allstep.launch.output.sink import wait_for_reader
from allstep.launch.output.writer import Output
from allstep.launch.run_events import (
    Complained,
    Decision,
    Exited,
    Greeted,
    KillAll,
    LeaveHost,
    LinkEnded,
    Refused,
    SendSignal,
    Signaled,
    StoreEnded,
    WorkerStarted,
)
from allstep.launch.run_state import RESUBMIT, HostRanks, RunState, span
from allstep.launch.signals import caught_signals
from allstep.limits import read_limits
from allstep.wire import keys
from allstep.world import places

__all__ = ["RESUBMIT", "Launcher"]

# For agents to clean up and leave at the end.
_FINISH_SECONDS = 5.0


class Launcher:
    """One run. `run()` returns the exit code."""

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
        self.store: wire.Server | None = None
        self.beater: threading.Thread | None = None
        self.ended = threading.Event()
        self.watch([])

    def watch(self, stations: Sequence[Station]) -> None:
        """Take these as the hosts of the run, in order of rank."""
        self.stations = stations
        hosts = [HostRanks(station.label, station.ranks, station.remote) for station in stations]
        self.state = RunState(hosts, self.job.grace, self.limits.lost)

    def run(self) -> int:
        """Start the workers, wait for their end, print the report if they failed."""
        self.watch(open_stations(self.job.hosts, self.job.ssh))
        self._listen()
        with (
            caught_signals() as signals,
            wire.Server(self.token, self._bind_address()) as self.store,
        ):
            self.selector.register(
                signals, selectors.EVENT_READ, lambda: self._on_signals(signals.recv(64))
            )
            self.output.wait = functools.partial(self._wait_for_reader, signals)
            try:
                self._greet()
                if self.state.may_start:
                    self._start_workers()
                while not self.state.is_over:
                    self._turn()
            finally:
                self._end_agents()
                self.output.wait = wait_for_reader
        self.output.close()
        return self._conclude()

    def _listen(self) -> None:
        for host, station in enumerate(self.stations):
            self.selector.register(station.link.read_fd, selectors.EVENT_READ, host)
            if station.process is not None and station.process.stderr is not None:
                # A full pipe would stop ssh, and the agent with it.
                hear = functools.partial(self._hear_complaints, station, station.process.stderr)
                self.selector.register(station.process.stderr, selectors.EVENT_READ, hear)

    def _moment(self) -> float:
        """Return the seconds since the run began: the time of events."""
        return time.monotonic() - self.began

    # Starting.

    def _bind_address(self) -> str:
        return "" if self._remotes() else "127.0.0.1"

    def _remotes(self) -> list[Station]:
        return [station for station in self.stations if station.remote]

    def _greet(self) -> None:
        """Wait for the hello of every agent."""
        if self._remotes():
            self.beater = threading.Thread(target=self._beat, name="allstep-beat", daemon=True)
            self.beater.start()
        while self.state.may_start and (
            late := [station for station in self.stations if station.hello is None]
        ):
            if (now := self._moment()) > self.limits.start:
                self.state.take(Refused(now, self.stations.index(late[0]), self._lateness(late)))
            self._turn()

    def _lateness(self, late: Sequence[Station]) -> str:
        printed = "".join(
            f"; {station.label}: {came}" for station in late if (came := station.link.what_came())
        )
        return (
            f"no answer from {', '.join(station.label for station in late)} within"
            f" {self.limits.start:.0f} s (ALLSTEP_START_TIMEOUT){printed}"
        )

    def _beat(self) -> None:
        """Run in a thread: show remote agents that the launcher lives."""
        while not self.ended.wait(self.limits.beat):
            for station in self._remotes():
                # A lost station gets no more of them, so that its agent ends what may still run.
                if not station.over and not station.link.outbox:
                    station.link.send(Alive())

    def _start_workers(self) -> None:
        assert self.store is not None
        self.store.set(keys.HOSTS, json.dumps([world.host for world in self.worlds]).encode())
        orders = Orders(
            self.job, self.worlds, self.stations, self.token, self.store.port, self.limits
        )
        try:
            starts = orders.all()
        except ConfigError as error:
            self.state.take(Refused(self._moment(), 0, str(error)))
            self._decide()
            return
        if self._remotes():
            self.output.say(orders.banner())
        self.state.start()
        for station, start in zip(self.stations, starts, strict=True):
            station.link.send(start)

    # Watching.

    def _turn(self) -> None:
        """Wait for something to happen, at most until the next thing that is due by the clock."""
        for key, _ in self.selector.select(0.1 if self.state.has_deadline else 1.0):
            if isinstance(key.data, int):
                self._hear(key.data, self.stations[key.data])
            else:
                key.data()
        assert self.store is not None
        if reason := self.store.failure:
            # Without a store ranks could neither join nor learn that one failed.
            self.state.take(StoreEnded(self._moment(), reason))
        self._decide()
        for station in self.stations:
            station.link.flush()

    def _decide(self) -> None:
        self._carry_out(self.state.decide(self._moment()))

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case SendSignal():
                    self._tell(Signal(decision.number), decision.host)
                case KillAll():
                    self._tell(Kill())
                case LeaveHost():
                    self._leave(self.stations[decision.host], lost=decision.lost)

    def _tell(self, message: Message, host: int | None = None) -> None:
        """Send a message to one host, or to all; not to those that are over."""
        for number, station in enumerate(self.stations):
            if not station.over and host in (None, number):
                station.link.send(message)

    def _leave(self, station: Station, *, lost: bool) -> None:
        station.over = True
        with contextlib.suppress(KeyError):
            self.selector.unregister(station.link.read_fd)
        if lost:
            station.kill_workers_here()

    def _wait_for_reader(self, signals: socket.socket, fd: int) -> bool:
        """Wait until the reader of our output reads. A signal to us is forwarded all the same.

        False when the run must end: what is left of the output is dropped.
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
            for station in self.stations:
                station.link.flush()

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGCHLD:
                self.state.take(Signaled(self._moment(), number))

    def _hear(self, host: int, station: Station) -> None:
        """Read what an agent has sent."""
        try:
            for message in station.link.receive():
                self.state.heard(host, self._moment())
                self._take(host, station, message)
        except BadMessage as bad:
            self.state.take(Refused(self._moment(), host, bad.described(station.label)))
        station.hear_complaints()
        if station.link.ended and not station.over:
            why = (
                station.why_it_did_not_start() if station.hello is None else station.why_it_ended()
            )
            self.state.take(LinkEnded(self._moment(), host, why))

    def _hear_complaints(self, station: Station, stream: IO[bytes]) -> None:
        if not station.hear_complaints():
            self.selector.unregister(stream)

    def _take(self, host: int, station: Station, message: Message) -> None:
        """Turn a message of an agent into an event; print lines, which are most of the messages."""
        if isinstance(message, Lines):
            _check_rank(message, station)
            self._print(message)
            return
        now = self._moment()
        match message:
            case Hello():
                station.hello = message
                self.state.take(Greeted(now, host))
            case Started():
                _check_rank(message, station)
                if not station.remote:
                    station.groups.append(message.pid)
                self.state.take(WorkerStarted(now, host))
            case Exit():
                _check_rank(message, station)
                self.state.take(self._exited(now, message))
            case Problem():
                self.state.take(Refused(now, host, f"{message.text} (on {station.label})"))

    def _exited(self, now: float, message: Exit) -> Exited:
        """Return the event, with what the rank left about its failure.

        That is the end of its standard error, and its record in the store.
        """
        assert self.store is not None
        rank, errors = message.rank, tuple(self.output.errors[message.rank])
        record = self.store.peek(keys.failure_of(rank)) if message.code else None
        return Exited(
            now, rank, message.code, errors, message.out_of_memory, cause.blamed_by(record)
        )

    def _print(self, message: Lines) -> None:
        errors = self.output.write(message.rank, message.stream, message.lines)
        if any(map(cause.starts_traceback, errors)):
            self.state.take(Complained(self._moment(), message.rank))

    # Ending.

    def _end_agents(self) -> None:
        """Ask the agents to clean up and leave, and print their last lines; after 5 s make them."""
        self._tell(Finish())
        end = time.monotonic() + _FINISH_SECONDS
        while time.monotonic() < end and any(
            station.hello and not station.over for station in self.stations
        ):
            for key, _ in self.selector.select(0.1):
                if isinstance(key.data, int):
                    self._hear_last(self.stations[key.data])
        self.ended.set()
        if self.beater is not None:
            # It must not write to what is closed now, or to what is opened there next.
            self.beater.join()
        for station in self.stations:
            station.end()

    def _hear_last(self, station: Station) -> None:
        """Print the last lines of a host. The run is over: nothing else that it sends matters."""
        with contextlib.suppress(BadMessage):
            for message in station.link.receive():
                if isinstance(message, Lines):
                    _check_rank(message, station)
                    self._print(message)
                elif isinstance(message, Hello):
                    station.hello = message
        station.hear_complaints()
        if station.link.ended:
            self._leave(station, lost=False)

    def _conclude(self) -> int:
        if self.state.problem:
            raise UserError(self.state.problem)
        end = self.state.conclusion(
            self._moment(), self.output.shows, foreground=self.job.foreground
        )
        if end.words:
            self.output.say(end.words)
        return end.code


def _check_rank(message: Lines | Started | Exit, station: Station) -> None:
    if message.rank not in station.ranks:
        what = (
            f"sent message {message.kind!r} with field 'rank': found {message.rank}, expected"
            f" {span(station.ranks)}"
        )
        raise BadMessage(what, message.kind, "rank", __version__)
