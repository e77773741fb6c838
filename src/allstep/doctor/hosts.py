"""Examine the hosts of -H: a probe on each host, and connections between all pairs.

    start   start a probe, with ssh or, for this machine, as a child process; it sends its facts
            within `HELLO_SECONDS`
    ask     let the probe listen on a free port, and read its clock
    try     connect from each host to every other and to this machine, all pairs at once, at the
            addresses that a run would use

Every phase has a timeout. A host that fails one is left out of the next; its row has the reason.
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
from allstep.launch.hosts.host_list import is_here
from allstep.launch.link import Link
from allstep.launch.messages import BadMessage, Message
from allstep.process.python import module_flags

# ssh itself stops connecting after 10 s.
HELLO_SECONDS = 13.0
ANSWER_SECONDS = 4.0
CONNECT_SECONDS = 4.0
THIS_MACHINE = "this machine"
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)
_R = TypeVar("_R")


@dataclass
class HostState:
    """State of one host during the examination."""

    host: Host
    here: bool
    """Whether it is this machine."""
    resolves_to: list[str] | None = None
    """Addresses of its name, as resolved here; None: the name server did not answer in time."""
    seconds: float | None = None
    """Seconds until its probe sent its facts."""
    error: str | None = None
    """Reason why the examination failed; None while it works."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of the probe's `ProbeHello`."""
    clock_offset: float | None = None
    """Seconds that its clock is ahead of ours."""
    address: str | None = None
    """Address at which the other hosts would reach it."""
    port: int | None = None
    """Port on which its probe listens."""

    @property
    def label(self) -> str:
        """Name of the host for messages."""
        return self.host.label

    @property
    def well(self) -> bool:
        """Whether the examination has not failed so far."""
        return self.error is None


@dataclass(frozen=True)
class Connection:
    """Attempt of one host to connect to another, or to this machine, on a free port.

    `error` is None if it worked. `interface` and `address` are the local interface and the target's
    address that were used.
    """

    source: str
    target: str
    error: str | None
    seconds: float
    interface: str | None = None
    address: str | None = None


@dataclass
class Visit:
    """Result of the examination of all hosts and of the connections between them."""

    states: list[HostState]
    connections: list[Connection]


class Call:
    """A running probe and the link to it."""

    def __init__(self, state: HostState, ssh: str) -> None:
        self.state = state
        self.began = time.monotonic()
        with tempfile.TemporaryFile() as file:
            self.process = subprocess.Popen(
                _command(state, ssh),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
            self.complaints = os.fdopen(os.dup(file.fileno()), "rb")
        assert self.process.stdin and self.process.stdout
        self.link = Link(self.process.stdout.fileno(), self.process.stdin.fileno(), TO_DOCTOR)
        self._received: list[Message] = []

    def wait_for(self, kind: type[_M], seconds: float) -> _M | None:
        """Return the next message of this kind; None if the probe has ended or after `seconds`.

        Also None after an invalid message; `HostState.error` then has the reason.
        """
        end = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.link.read_fd, select.POLLIN)
        while True:
            self.link.flush()
            self._receive()
            for message in self._received:
                if isinstance(message, kind):
                    self._received.remove(message)
                    return message
            left = end - time.monotonic()
            if self.link.ended or left <= 0 or self.state.error:
                return None
            poll.poll(min(left, 0.1 if self.link.outbox else 1.0) * 1000)

    def _receive(self) -> None:
        """Read the messages that have arrived; an invalid one becomes the error of the host."""
        try:
            # One by one, so that those before an invalid message are kept.
            for message in self.link.receive():
                self._received.append(message)
        except BadMessage as bad:
            self.state.error = bad.described(self.state.label)

    def why_not(self) -> str:
        """Return one line about why the probe sent no facts."""
        label = self.state.label
        if not self.link.ended:
            return f"no answer from {label} within {HELLO_SECONDS:.0f} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        self.complaints.seek(0)
        stderr = self.complaints.read().decode(errors="replace")
        return launch_ssh.describe_failure(label, self.process.returncode, stderr)

    def end(self) -> None:
        """Kill the probe and close its streams."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.complaints):
            assert stream is not None
            stream.close()


def _command(state: HostState, ssh: str) -> list[str]:
    """Return the command that starts the probe on its host."""
    probe = [*module_flags("allstep.doctor.probe"), state.label]
    return (
        [sys.executable, *probe]
        if state.here
        else launch_ssh.command_on(state.host.name, ssh, *probe)
    )


def visit(hosts: Sequence[Host], ssh: str, iface: str | None = None) -> Visit:
    """Examine all hosts at once, and the connections between them.

    A host that fails raises nothing; its `HostState.error` has the reason. `ssh` and `iface` are
    those of `allstep run`: the ssh command, and the network interface (None: by route).
    """
    states = _in_parallel(_look_up, hosts)
    ourselves = (
        [] if any(state.here for state in states) else [HostState(Host(THIS_MACHINE, 0), here=True)]
    )
    token = wire.new_token()
    calls = [call for state in [*states, *ourselves] if (call := _start(state, ssh)) is not None]
    try:
        _in_parallel(lambda call: _ask(call, token), calls)
        _choose_addresses([call.state for call in calls], iface)
        able = [call for call in calls if call.state.well]
        tried = _in_parallel(
            lambda call: _try(call, able, token, iface),
            [call for call in able if call.state in states],
        )
    finally:
        for call in calls:
            call.end()
    return Visit(states, [connection for some in tried for connection in some])


def _in_parallel(do: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Call `do` for all items in threads; return the results in order."""
    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(do, items))


def _look_up(host: Host) -> HostState:
    """Resolve the host's name here. A name that only ssh's configuration knows is no error."""
    found = resolve(host.label)
    return HostState(host, here=found is not None and is_here(host.name), resolves_to=found)


def _start(state: HostState, ssh: str) -> Call | None:
    """Start the probe; on failure record the error of the host and return None."""
    try:
        return Call(state, ssh)
    except (OSError, ValueError) as error:
        program = launch_ssh.split_command(ssh)[0] if not state.here else sys.executable
        state.error = (
            f"cannot start {program!r} to reach {state.label}:"
            f" {getattr(error, 'strerror', None) or error}"
        )
        return None


def _ask(call: Call, token: str) -> None:
    """Receive the probe's facts, let it listen on a port, and read its clock."""
    state = call.state
    hello = call.wait_for(ProbeHello, HELLO_SECONDS)
    if hello is None:
        state.error = state.error or call.why_not()
        return
    state.seconds = time.monotonic() - call.began
    state.facts = asdict(hello)
    call.link.send(Listen(token))
    listening = call.wait_for(Listening, ANSWER_SECONDS)
    asked = time.time()
    call.link.send(AskClock())
    clock = call.wait_for(Clock, ANSWER_SECONDS)
    if listening is None or clock is None:
        state.error = (
            state.error
            or f"{state.label} answered once, then sent nothing for {ANSWER_SECONDS:.0f} s"
        )
        return
    state.port = listening.port
    state.clock_offset = clock.now - (asked + time.time()) / 2


def _choose_addresses(states: list[HostState], iface: str | None) -> None:
    """Set the address at which a run would reach each host.

    That is the address that ssh connected to; for this machine, the one from which it reaches the
    others. `iface` selects the address of that interface instead.
    """
    if iface:
        for state in states:
            _take_address_of(state, iface)
        return
    remote = [
        str(found) for state in states if (found := state.facts.get("address")) and not state.here
    ]
    for state in states:
        if state.here:
            state.address = next(
                (source for a in remote if (source := machine.route_to(a))), "127.0.0.1"
            )
        elif state.well:
            state.address = state.facts["address"]


def _take_address_of(state: HostState, iface: str) -> None:
    """Set the address to that of the interface; record an error if the host does not have it."""
    if not state.well:
        return
    interfaces = state.facts["network"]["interfaces"]
    found = interfaces.get(iface)
    if found:
        state.address = found[0]
    elif state.label != THIS_MACHINE:
        known = ", ".join(name for name, addresses in interfaces.items() if addresses)
        state.error = (
            f"--iface {iface}: {state.label} has no such interface with an address; it has {known}"
        )


def _try(call: Call, calls: list[Call], token: str, iface: str | None) -> list[Connection]:
    """Connect from one host to all others at once; return one result per target."""
    source = call.state
    others = [other.state for other in calls if other is not call]
    targets = tuple(
        Target(other.label, tuple(_addresses(other, source, iface))) for other in others
    )
    call.link.send(Connect(token, targets, CONNECT_SECONDS))
    end = time.monotonic() + 2 * CONNECT_SECONDS + 1.0
    missing = {other.label for other in others}
    results = []
    while missing and (reached := call.wait_for(Reached, end - time.monotonic())) is not None:
        missing.discard(reached.to)
        result = reached.to, reached.error, reached.seconds, reached.interface, reached.address
        results.append(Connection(source.label, *result))
    results += [
        Connection(source.label, label, "no answer in time", 2 * CONNECT_SECONDS)
        for label in sorted(missing)
    ]
    order = [other.label for other in others]
    return sorted(results, key=lambda connection: order.index(connection.target))


def _addresses(target: HostState, source: HostState, iface: str | None) -> list[tuple[str, int]]:
    """Return the addresses and port at which `source` connects to `target`, in order.

    For the launching machine, a run tries all its addresses, the one that ssh came from first.
    """
    assert target.port is not None
    found: list[Any] = [target.address]
    if target.host.name == THIS_MACHINE and not source.here:
        chosen = machine.interfaces().get(iface) if iface else None
        found = chosen or [source.facts.get("doctor_address"), *machine.outside_addresses()]
    return [(address, target.port) for address in dict.fromkeys(filter(None, found))]
