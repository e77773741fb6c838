"""The hosts of -H: a probe on each, asked what is there, and a connection tried from each to every
other and to this machine.

    start   ssh, or a child process for a name that means this machine; hello with facts within
    `HELLO_SECONDS` ask     listen on a fresh port; what time is it try     all pairs at once, each
    at the addresses that a run would use

Every step has a time limit, and a host that fails one is left out of the next. Its row then says
why.
"""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from allstep import machine, wire
from allstep.doctor.machine_facts import resolve
from allstep.doctor.probe_messages import (
    TO_DOCTOR,
    AskClock,
    Clock,
    Connect,
    Listen,
    Listening,
    ProbeHello,
    Reached,
    Target,
)
from allstep.launch import Host
from allstep.launch.hosts import ssh as launch_ssh
from allstep.launch.hosts.parse import is_here
from allstep.launch.link import Link
from allstep.launch.messages import BadMessage, Message
from allstep.process.python import module_flags

HELLO_SECONDS = 13.0  # ssh itself gives up connecting after 10
ANSWER_SECONDS = 4.0
CONNECT_SECONDS = 4.0
THIS_MACHINE = "this machine"
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)
_R = TypeVar("_R")


@dataclass
class Station:
    """One host as the doctor sees it."""

    host: Host
    here: bool
    resolves_to: list[str] | None = None
    seconds: float | None = None  # until its probe said hello
    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    clock_offset: float | None = None  # seconds that its clock is ahead of ours
    address: str | None = None  # at which the others would reach it
    port: int | None = None

    @property
    def label(self) -> str:
        return self.host.label

    @property
    def well(self) -> bool:
        return self.error is None


@dataclass(frozen=True)
class Connection:
    """An attempt of one host to reach another (or this machine) on a fresh port.

    `error` None: it worked.
    """

    source: str
    target: str
    error: str | None
    seconds: float
    interface: str | None = None
    address: str | None = None


@dataclass
class Visit:
    """All hosts, and all pairs of them."""

    stations: list[Station]
    connections: list[Connection]


class Call:
    """A probe under way, and what it says."""

    def __init__(self, station: Station, ssh: str) -> None:
        self.station = station
        self.began = time.monotonic()
        with tempfile.TemporaryFile() as file:
            self.process = subprocess.Popen(
                _command(station, ssh),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
            self.complaints = os.fdopen(os.dup(file.fileno()), "rb")
        assert self.process.stdin and self.process.stdout
        self.link = Link(self.process.stdout.fileno(), self.process.stdin.fileno(), TO_DOCTOR)
        self._heard: list[Message] = []

    def wait_for(self, kind: type[_M], seconds: float) -> _M | None:
        """Return the next message of this kind; None when the probe is gone or the time is over.

        Also None after a message that is not understood; `Station.error` then has the reason.
        """
        end = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.link.read_fd, select.POLLIN)
        while True:
            self.link.flush()
            self._receive()
            for message in self._heard:
                if isinstance(message, kind):
                    self._heard.remove(message)
                    return message
            left = end - time.monotonic()
            if self.link.ended or left <= 0 or self.station.error:
                return None
            poll.poll(min(left, 0.1 if self.link.outbox else 1.0) * 1000)

    def _receive(self) -> None:
        try:
            # One by one: those before a bad message count.
            for message in self.link.receive():
                self._heard.append(message)
        except BadMessage as bad:
            self.station.error = bad.described(self.station.label)

    def why_not(self) -> str:
        """One line for a probe that did not say hello."""
        label = self.station.label
        if not self.link.ended:
            return f"no answer from {label} within {HELLO_SECONDS:.0f} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        self.complaints.seek(0)
        said = self.complaints.read().decode(errors="replace")
        return launch_ssh.describe_failure(label, self.process.returncode, said)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.complaints):
            assert stream is not None
            stream.close()


def _command(station: Station, ssh: str) -> list[str]:
    probe = [*module_flags("allstep.doctor.probe"), station.label]
    return (
        [sys.executable, *probe]
        if station.here
        else launch_ssh.command_on(station.host.name, ssh, *probe)
    )


def visit(hosts: Sequence[Host], ssh: str, iface: str | None = None) -> Visit:
    """Go to all hosts at once.

    Nothing is raised for a host that is not well. `iface`: as in `allstep run --iface`.
    """
    stations = _side_by_side(_look_up, hosts)
    ourselves = (
        []
        if any(station.here for station in stations)
        else [Station(Host(THIS_MACHINE, 0), here=True)]
    )
    token = wire.new_token()
    calls = [
        call for station in [*stations, *ourselves] if (call := _start(station, ssh)) is not None
    ]
    try:
        _side_by_side(lambda call: _ask(call, token), calls)
        _choose_addresses([call.station for call in calls], iface)
        able = [call for call in calls if call.station.well]
        tried = _side_by_side(
            lambda call: _try(call, able, token, iface),
            [call for call in able if call.station in stations],
        )
    finally:
        for call in calls:
            call.end()
    return Visit(stations, [connection for some in tried for connection in some])


def _side_by_side(do: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(do, items))


def _look_up(host: Host) -> Station:
    """The name as it is known here; one that only ssh's configuration knows is fine."""
    found = resolve(host.label)
    return Station(host, here=found is not None and is_here(host.name), resolves_to=found)


def _start(station: Station, ssh: str) -> Call | None:
    try:
        return Call(station, ssh)
    except (OSError, ValueError) as error:
        program = launch_ssh.split_command(ssh)[0] if not station.here else sys.executable
        station.error = (
            f"cannot start {program!r} to reach {station.label}:"
            f" {getattr(error, 'strerror', None) or error}"
        )
        return None


def _ask(call: Call, token: str) -> None:
    """What is there, a port that listens, the clock."""
    station = call.station
    hello = call.wait_for(ProbeHello, HELLO_SECONDS)
    if hello is None:
        station.error = station.error or call.why_not()
        return
    station.seconds = time.monotonic() - call.began
    station.facts = asdict(hello)
    call.link.send(Listen(token))
    listening = call.wait_for(Listening, ANSWER_SECONDS)
    asked = time.time()
    call.link.send(AskClock())
    clock = call.wait_for(Clock, ANSWER_SECONDS)
    if listening is None or clock is None:
        station.error = (
            station.error
            or f"{station.label} answered once and then fell silent for {ANSWER_SECONDS:.0f} s"
        )
        return
    station.port = listening.port
    station.clock_offset = clock.now - (asked + time.time()) / 2


def _choose_addresses(stations: list[Station], iface: str | None) -> None:
    """Where a run would look for each: at the address that ssh found; here, at the one from which
    we reach the others."""
    if iface:
        for station in stations:
            _take_address_of(station, iface)
        return
    remote = [
        str(found)
        for station in stations
        if (found := station.facts.get("address")) and not station.here
    ]
    for station in stations:
        if station.here:
            station.address = next(
                (source for a in remote if (source := machine.route_to(a))), "127.0.0.1"
            )
        elif station.well:
            station.address = station.facts["address"]


def _take_address_of(station: Station, iface: str) -> None:
    if not station.well:
        return
    interfaces = station.facts["network"]["interfaces"]
    found = interfaces.get(iface)
    if found:
        station.address = found[0]
    elif station.label != THIS_MACHINE:
        known = ", ".join(name for name, addresses in interfaces.items() if addresses)
        station.error = (
            f"--iface {iface}: {station.label} has no such interface with an address; it has"
            f" {known}"
        )


def _try(call: Call, everyone: list[Call], token: str, iface: str | None) -> list[Connection]:
    """From one host to all others at once."""
    source = call.station
    others = [other.station for other in everyone if other is not call]
    targets = tuple(
        Target(other.label, tuple(_addresses(other, source, iface))) for other in others
    )
    call.link.send(Connect(token, targets, CONNECT_SECONDS))
    end = time.monotonic() + 2 * CONNECT_SECONDS + 1.0
    missing = {other.label for other in others}
    results = []
    while missing and (reached := call.wait_for(Reached, end - time.monotonic())) is not None:
        missing.discard(reached.to)
        results.append(
            Connection(
                source.label,
                reached.to,
                reached.error,
                reached.seconds,
                reached.interface,
                reached.address,
            )
        )
    results += [
        Connection(source.label, label, "no answer in time", 2 * CONNECT_SECONDS)
        for label in sorted(missing)
    ]
    return sorted(
        results, key=lambda connection: [other.label for other in others].index(connection.target)
    )


def _addresses(target: Station, source: Station, iface: str | None) -> list[tuple[str, int]]:
    """Of the launching machine a run tries all addresses, the one that ssh came from first."""
    assert target.port is not None
    found: list[Any] = [target.address]
    if target.host.name == THIS_MACHINE and not source.here:
        chosen = machine.interfaces().get(iface) if iface else None
        found = chosen or [source.facts.get("doctor_address"), *machine.outside_addresses()]
    return [(address, target.port) for address in dict.fromkeys(filter(None, found))]
