"""The launcher: starts an agent on every host, gives each its workers, and watches until all have ended.

Its life::

    agents -> hello from each -> start -> lines, lines, ... -> exits -> finish -> report, exit code
                                              |
                             a rank fails: wait a moment for the true cause, stop the others (SIGTERM, then SIGKILL)
                             a host falls silent for `lost` seconds: the same
                             the store's thread ends: kill all, since ranks would wait for it forever
                             a signal to us: forwarded once, then SIGKILL after the grace time

Everything happens in one loop over the links to the agents; two small threads serve the store and tell remote agents that we live.
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
from collections.abc import Sequence
from typing import IO

from allstep import machine, wire
from allstep._version import __version__
from allstep.errors import ConfigError, UserError
from allstep.launch import failure, horovod
from allstep.launch.failure import Failure
from allstep.launch.host_connection import Station, open_stations
from allstep.launch.hosts import ssh
from allstep.launch.hosts.addresses import choose_address
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
    Start,
    Started,
    WorkerOrder,
)
from allstep.launch.output.sink import wait_for_reader
from allstep.launch.output.writer import Output
from allstep.launch.signals import caught_signals
from allstep.limits import read_limits
from allstep.world import places

RESUBMIT = 75  # a worker's exit code: saved, start me again
_SETTLE_SECONDS = 0.25  # after the first failure: others that failed by themselves may be about to say so
_CAUSE_SECONDS = (
    2.0  # as long as all that failed blame a lost connection, or say nothing: the one that knows should turn up
)
_STOP_SECONDS = 3.0  # between SIGTERM and SIGKILL when a rank failed, or after Ctrl-C
_GIVE_UP_SECONDS = 10.0  # after SIGKILL to all: an agent that has not said by then how its workers ended is left
_QUIET_SECONDS = 3.0  # a host silent for so long may be the cause


class Launcher:
    """One run. `run()` returns the exit code."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.worlds = places([host.label for host in job.hosts for _ in range(host.slots)])
        self.limits = read_limits(job.env)
        self.output = Output(len(self.worlds), job.show, job.log_dir, job.stream_dir, job.prefix, job.timestamps)
        self.began = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.token = wire.new_token()
        self.stations: list[Station] = []
        self.store: wire.Server | None = None
        self.exits: dict[int, int] = {}
        self.failures: list[Failure] = []
        self.complained: dict[int, float] = {}  # rank -> when its last traceback began
        self.settled: float | None = None  # when the first failure came
        self.problem: str | None = None
        self.store_failure: str | None = None
        self.started = False
        self.turned = self.began  # when we last looked around
        self.beater: threading.Thread | None = None
        self.stopped = 0
        self.stopping = False
        self.kill_at: float | None = None
        self.give_up_at: float | None = None
        self.signals: list[int] = []
        self.ended = threading.Event()

    def run(self) -> int:
        self.stations = open_stations(self.job.hosts, self.job.ssh)
        for station in self.stations:
            self.selector.register(station.link.read_fd, selectors.EVENT_READ, station)
            if station.process is not None and station.process.stderr is not None:
                # A full pipe would stop ssh, and the agent with it.
                hear = functools.partial(self._hear_complaints, station, station.process.stderr)
                self.selector.register(station.process.stderr, selectors.EVENT_READ, hear)
        with caught_signals() as signals, wire.Server(self.token, self._bind_address()) as self.store:
            self.selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(signals.recv(64)))
            self.output.wait = functools.partial(self._wait_for_reader, signals)
            try:
                self._greet()
                if self._may_go_on():
                    self._start_workers()
                while not self._all_over():
                    self._turn()
            finally:
                self._end_agents()
                self.output.wait = wait_for_reader
        self.output.close()
        return self._conclude()

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
        end = self.began + self.limits.start
        while self._may_go_on() and any(station.hello is None for station in self.stations):
            if time.monotonic() > end:
                late = [station for station in self.stations if station.hello is None]
                printed = "".join(
                    f"; {station.label}: {came}" for station in late if (came := station.link.what_came())
                )
                self.problem = (
                    f"no answer from {', '.join(station.label for station in late)} within {self.limits.start:.0f} s "
                    f"(ALLSTEP_START_TIMEOUT){printed}"
                )
            self._turn()

    def _may_go_on(self) -> bool:
        return not (self.problem or self.signals or self.failures or self.store_failure)

    def _beat(self) -> None:
        while not self.ended.wait(self.limits.beat):
            for station in self._remotes():
                # A lost station hears no more of us, so that its agent ends what may still run.
                if not station.over and not station.link.outbox:
                    station.link.send(Alive())

    def _start_workers(self) -> None:
        assert self.store is not None
        self.store.set("allstep/hosts", json.dumps([world.host for world in self.worlds]).encode())
        try:
            addresses = [self._address(station) for station in self.stations]
            orders = [self._order(station, addresses) for station in self.stations]
        except ConfigError as error:
            self.problem = str(error)
            return
        if self._remotes():
            self.output.say(self._banner())
        self.started = True
        for station, order in zip(self.stations, orders, strict=True):
            station.link.send(order)

    def _banner(self) -> str:
        where = ", ".join(f"{station.label} has {_span(station.ranks)}" for station in self.stations)
        return f"allstep run: {len(self.worlds)} workers on {len(self.stations)} hosts: {where}"

    def _address(self, station: Station) -> str:
        """The address at which the other hosts reach this one."""
        assert station.hello is not None
        # Checked on a single host, too, where it is not used: the next run may have two.
        address = self._address_of_iface(station) if self.job.iface else None
        if not self._remotes():
            return "127.0.0.1"
        if address:
            return address
        if station.remote:
            hello = station.hello
            return hello.address or choose_address(station.label, hello.interfaces, machine.interfaces())
        sources = (machine.route_to(self._address(other)) for other in self._remotes())
        return next((source for source in sources if source), "127.0.0.1")

    def _address_of_iface(self, station: Station) -> str:
        assert station.hello is not None and self.job.iface is not None
        found = station.hello.interfaces.get(self.job.iface)
        if not found:
            known = ", ".join(station.hello.interfaces)
            raise ConfigError(
                f"--iface {self.job.iface}: {station.label} has no such interface with an address; it has {known}"
            )
        return found[0]

    def _order(self, station: Station, addresses: list[str]) -> Start:
        """What the agent of a station is told to start."""
        assert self.store is not None and self.stations[0].hello is not None
        index = self.stations.index(station)
        own = addresses[index]
        env = ssh.forwarded(self.job.env, self.job.env_only) if station.remote else self.job.env
        return Start(
            command=tuple(self.job.command),
            cwd=self.job.cwd,
            env={**env, **self._common(addresses, index)},
            workers=tuple(WorkerOrder(rank, self._place(rank)) for rank in station.ranks),
            foreground=0 if self.job.foreground and not station.remote else None,
            store=tuple((address, self.store.port) for address in self._store_addresses(station)),
            token=self.token,
            peers=tuple(address for address in addresses if address != own) if len(self.stations) > 1 else (),
            iface=self.job.iface if self._remotes() else None,
            lost=self.limits.lost_for_agent,
            beat=self.limits.beat,
        )

    def _place(self, rank: int) -> dict[str, str]:
        return {**self.worlds[rank].to_env(), **horovod.place_variables(self.worlds[rank])}

    def _common(self, addresses: list[str], index: int) -> dict[str, str]:
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
        """Where this station may find our store: the address ssh came from first, then all that we have."""
        if not station.remote:
            return ["127.0.0.1"]
        assert station.hello is not None
        asked_for = machine.interfaces().get(self.job.iface, []) if self.job.iface else []
        candidates = [*asked_for, station.hello.launcher_address, *machine.outside_addresses()]
        return list(dict.fromkeys(address for address in candidates if address))

    # Watching.

    def _turn(self) -> None:
        """Wait for something to happen, at most until the next thing that is due by the clock."""
        for key, _ in self.selector.select(0.1 if self._clock_runs() else 1.0):
            if isinstance(key.data, Station):
                self._hear(key.data)
            else:
                key.data()
        self._check_store()
        now = time.monotonic()
        self._excuse(now)
        for station in self.stations:
            station.link.flush()
            # Before the hello, ssh is connecting: that time has a limit of its own (`_greet`).
            if station.remote and station.hello and not station.over and now - station.heard > self.limits.lost:
                self._lose(station, f"no sign of life for {now - station.heard:.0f} s")
        self._settle(now)
        if self._is_time_to_give_up(now):
            self._give_up(now)

    def _wait_for_reader(self, signals: socket.socket, fd: int) -> bool:
        """Wait until the reader of our output reads. A signal to us is forwarded all the same; a run that must end drops the rest."""
        waiting = select.poll()
        waiting.register(fd, select.POLLOUT)
        waiting.register(signals, select.POLLIN)
        while True:
            found = dict(waiting.poll(100 if self._clock_runs() else 1000))
            if fd in found:
                return True
            if found:
                self._on_signals(signals.recv(64))
            if self._is_time_to_give_up(time.monotonic()):
                return False
            for station in self.stations:
                station.link.flush()

    def _is_time_to_give_up(self, now: float) -> bool:
        """Kill the workers when the grace time is over; return whether they have had enough time to end after that."""
        if self.kill_at is not None and now > self.kill_at:
            self._kill_all(now)
        return self.give_up_at is not None and now > self.give_up_at

    def _kill_all(self, now: float) -> None:
        self.kill_at = None
        self.give_up_at = self.give_up_at or now + _GIVE_UP_SECONDS
        self._tell_all(Kill())

    def _give_up(self, now: float) -> None:
        """Leave agents that do not answer (stopped, or held up by the system): a run that was told to end must end."""
        self.give_up_at = now + _GIVE_UP_SECONDS
        for station in self.stations:
            if not station.over and any(rank not in self.exits for rank in station.ranks):
                self._lose(station, f"its agent did not answer within {_GIVE_UP_SECONDS:.0f} s")

    def _excuse(self, now: float) -> None:
        """While we stood still ourselves (stopped, or the whole machine was), nobody's silence counts."""
        since, self.turned = now - self.turned, now
        if since > 2.0:  # a turn takes a second at most
            for station in self.stations:
                station.heard = min(now, station.heard + since)

    def _check_store(self) -> None:
        """End the run without a store: ranks could neither join nor learn that one failed."""
        assert self.store is not None
        if self.store_failure is None and self.store.failure:
            self.store_failure = self.store.failure
            self._stop(signal.SIGKILL, 0.0)

    def _clock_runs(self) -> bool:
        return bool(self.failures or self.signals or self.kill_at or self.give_up_at)

    def _hear(self, station: Station) -> None:
        try:
            for message in station.link.receive():
                station.heard = time.monotonic()
                self._take(station, message)
        except BadMessage as bad:
            self._refuse(station, bad)
        station.hear_complaints()
        if station.link.ended and not station.over:
            self._gone(station)

    def _refuse(self, station: Station, bad: BadMessage) -> None:
        """End the run: an agent sent what the launcher cannot use. Its first error is reported."""
        self.problem = self.problem or bad.described(station.label)
        if self.started and not self.stopping:
            self._stop(signal.SIGKILL, 0.0)

    def _take(self, station: Station, message: Message) -> None:
        """Handle a message of an agent. Lines come first: they are most of the messages."""
        if isinstance(message, Lines | Started | Exit) and message.rank not in station.ranks:
            what = f"sent message {message.kind!r} with field 'rank': found {message.rank}, expected {_span(station.ranks)}"
            raise BadMessage(what, message.kind, "rank", __version__)
        match message:
            case Lines():
                self._on_lines(message)
            case Exit():
                self._on_exit(station, message)
            case Started():
                self._on_started(station, message)
            case Hello():
                station.hello = message
            case Problem():
                self.problem = f"{message.text} (on {station.label})"
                self._stop(signal.SIGKILL, 0.0)

    def _hear_complaints(self, station: Station, stream: IO[bytes]) -> None:
        if not station.hear_complaints():
            self.selector.unregister(stream)

    def _on_started(self, station: Station, message: Started) -> None:
        if not station.remote:
            station.groups.append(message.pid)
        if self.stopping:
            station.link.send(Signal(signal.SIGTERM))

    def _on_lines(self, message: Lines) -> None:
        if any(map(failure.starts_traceback, self.output.write(message.rank, message.stream, message.lines))):
            self.complained[message.rank] = self._moment()

    def _on_exit(self, station: Station, message: Exit) -> None:
        rank, code = message.rank, message.code
        self.exits[rank] = code
        if code == 0 or self.stopping or self.signals:
            return
        if code == RESUBMIT:
            self.kill_at = self.kill_at or time.monotonic() + self.job.grace
            return
        now = self._moment()
        complained = self.complained.get(rank, now)
        moment = complained if now - complained < 5.0 else now
        self._fail(Failure(rank, station.label, code, moment, tuple(self.output.errors[rank]), message.out_of_memory))

    def _gone(self, station: Station) -> None:
        """The link has ended: before the hello, ssh or the agent could not start; later the host, or the agent, was lost."""
        if station.hello is None:
            self.problem = station.why_it_did_not_start()
        if all(rank in self.exits for rank in station.ranks) or self.problem:
            station.over = True
            self.selector.unregister(station.link.read_fd)
        else:
            self._lose(station, station.why_it_ended())

    def _lose(self, station: Station, why: str) -> None:
        station.over = True
        with contextlib.suppress(KeyError):
            self.selector.unregister(station.link.read_fd)
        station.kill_workers_here()
        open_ranks = [rank for rank in station.ranks if rank not in self.exits]
        for rank in open_ranks:
            self.exits[rank] = 1
        if open_ranks and not self.stopping and not self.signals:
            lost = f"{why} ({_span(open_ranks)})"
            self._fail(Failure(open_ranks[0], station.label, 1, self._moment(), lost=lost))

    def _moment(self) -> float:
        return time.monotonic() - self.began

    def _fail(self, failed: Failure) -> None:
        self.failures.append(failed)
        if self.settled is None:
            self.settled = time.monotonic()

    def _settle(self, now: float) -> None:
        """Stop the others as soon as we know which failure was the cause, or have waited long enough for it."""
        if self.settled is None or self.stopping:
            return
        waited = now - self.settled
        if waited < _SETTLE_SECONDS:
            return
        if all(failed.is_consequence or failed.is_silent for failed in self.failures) and len(self.exits) < len(
            self.worlds
        ):
            quiet = any(now - station.heard > _QUIET_SECONDS for station in self._remotes() if not station.over)
            if waited < (self.limits.lost + _CAUSE_SECONDS if quiet else _CAUSE_SECONDS):
                return
        assert self.store is not None
        cause = failure.first(self.failures)
        self.store.set(
            "allstep/failed", json.dumps({"rank": cause.rank, "host": cause.host, "how": cause.how}).encode()
        )
        self._stop(signal.SIGTERM, min(self.job.grace, _STOP_SECONDS))

    def _stop(self, number: int, grace: float) -> None:
        self.stopping = True
        self.stopped = len(self.worlds) - len(self.exits)
        self._tell_all(Signal(number))
        self.kill_at = time.monotonic() + grace

    def _tell_all(self, message: Message) -> None:
        for station in self.stations:
            if not station.over:
                station.link.send(message)

    # Signals to us.

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGINT and signal.SIGINT in self.signals:
                self._kill_all(time.monotonic())
            elif number not in self.signals and number != signal.SIGCHLD:
                self.signals.append(number)
                self._tell_all(Signal(number))
                grace = min(self.job.grace, _STOP_SECONDS) if number == signal.SIGINT else self.job.grace
                self.kill_at = min(self.kill_at or float("inf"), time.monotonic() + grace)

    # Ending.

    def _all_over(self) -> bool:
        if self.problem or len(self.exits) == len(self.worlds):
            return True
        if not self.started and not self._may_go_on():
            return True  # there is no worker whose end could be waited for
        return all(station.over for station in self.stations)

    def _end_agents(self) -> None:
        """Ask the agents to clean up and leave; after 5 s make them."""
        self._tell_all(Finish())
        end = time.monotonic() + 5.0
        while time.monotonic() < end and any(station.hello and not station.over for station in self.stations):
            for key, _ in self.selector.select(0.1):
                if isinstance(key.data, Station):
                    self._hear(key.data)
        self.ended.set()
        if self.beater is not None:
            self.beater.join()  # it must not write to what we close now, or to what is opened there next
        for station in self.stations:
            station.end()

    def _conclude(self) -> int:
        if self.problem:
            raise UserError(self.problem)
        codes = list(self.exits.values())
        if self.store_failure:
            self.output.say(
                f"allstep run: the launcher's store ended by itself ({self.store_failure}), "
                f"{self._moment():.1f} s after the start; {self.stopped} of {len(self.worlds)} workers "
                "were killed. "
                "This is a defect of allstep: start again, and report it"
            )
            return 1
        if self.failures:
            seen = [failed for failed in self.failures if self.output.shows(failed.rank)]
            words = failure.closing_words(self.failures, seen, len(self.worlds), self.stopped)
            if not (self.job.foreground and failure.teller(self.failures, seen)):  # a verb of ours: its line is enough
                self.output.say(words)
            return failure.first(self.failures).exit_code
        if RESUBMIT in codes:
            return RESUBMIT
        if self.signals and (any(codes) or len(codes) < len(self.worlds)):
            return 128 + self.signals[0]
        return 0


def _span(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 2-3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
