"""The doctor's process on a host: reports facts, listens on a free port, connects to other probes.

It runs on this machine as a child process and on other hosts through ssh, like the launcher's
agent, and uses the launcher's `Link` on its standard streams. It ends when that stream ends, or
after a minute.

Its messages are in `probe_messages`. It listens with the small store of `allstep.wire`, as a
launcher would, so that a connection proves that the right process answers.
"""

import os
import select
import sys
import threading
import time
from dataclasses import asdict

from allstep import machine, wire
from allstep._version import __version__
from allstep.doctor import machine_facts, packages
from allstep.doctor.probe_messages import (
    TO_PROBE,
    AskClock,
    Clock,
    Connect,
    Listen,
    Listening,
    ProbeHello,
    Reached,
    Target,
)
from allstep.launch.link import Link
from allstep.launch.messages import BadMessage, Message

LIFE_SECONDS = 60.0


class Probe:
    """Answers the doctor's requests until the link ends or `LIFE_SECONDS` have passed."""

    def __init__(self, link: Link, label: str) -> None:
        self.link = link
        self.label = label
        self.server: wire.Server | None = None

    def run(self) -> None:
        """Send the facts, then answer requests."""
        self.link.send(_facts())
        end = time.monotonic() + LIFE_SECONDS
        while not self.link.ended and time.monotonic() < end:
            select.select([self.link.read_fd], [], [], 0.05 if self.link.outbox else 1.0)
            self.link.flush()
            for message in self.link.receive():
                self._answer(message)

    def _answer(self, message: Message) -> None:
        """Handle one request; connections are opened in threads."""
        match message:
            case Listen():
                self.server = wire.Server(message.token, "")
                self.server.set("who", self.label.encode())
                self.link.send(Listening(self.server.port))
            case AskClock():
                self.link.send(Clock(time.time()))
            case Connect():
                for target in message.targets:
                    arguments = (target, message.token, message.seconds)
                    threading.Thread(target=self._connect, args=arguments, daemon=True).start()

    def _connect(self, target: Target, token: str, seconds: float) -> None:
        """Connect to a probe and send the result."""
        self.link.send(reach(target, token, seconds))


def reach(target: Target, token: str, seconds: float) -> Reached:
    """Connect to a probe; return seconds, local interface and address used, or the error."""
    began = time.monotonic()
    try:
        client = wire.Client(list(target.addresses), token, seconds)
        address = client.server_address[0]
        who = client.get("who", seconds).decode()
        interface = machine.interface_of(client.local_address)
        client.close()
    except OSError as reason:
        error = str(reason).replace("no store within", "no answer within")
        return Reached(target.label, error, time.monotonic() - began, None, None)
    wrong = None if who == target.label else f"{who} answered in its place"
    return Reached(target.label, wrong, time.monotonic() - began, interface, address)


def _facts() -> ProbeHello:
    """Return the facts about this host."""
    # SSH_CONNECTION has the doctor's address and port, then ours.
    ssh = os.environ.get("SSH_CONNECTION", "").split()
    remote = len(ssh) == 4
    return ProbeHello(
        allstep=__version__,
        python=".".join(map(str, sys.version_info[:3])),
        torch=packages.version_of("torch"),
        cores=asdict(machine_facts.cores()),
        memory=asdict(machine.memory()),
        network=asdict(machine_facts.network()),
        doctor_address=ssh[0] if remote else None,
        address=ssh[2] if remote else None,
    )


def main() -> None:
    """Run the probe on the standard streams, which are the link to the doctor."""
    _, label = sys.argv
    to_doctor = os.dup(1)
    # A stray print must not mix with the messages.
    os.dup2(2, 1)
    try:
        Probe(Link(0, to_doctor, TO_PROBE), label).run()
    except BadMessage as bad:
        sys.exit(bad.described("the doctor"))


if __name__ == "__main__":
    main()
