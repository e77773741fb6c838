"""The messages between the doctor and its probes; `launch.messages` has the format and the checks.

==========  ====================================================================================
to probe    `Listen`, `AskClock`, `Connect`
to doctor   `ProbeHello`, `Listening`, `Clock`, `Reached` (one for each target of `Connect`)
==========  ====================================================================================

A probe of another version is accepted: different versions are one of the doctor's findings.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from allstep.launch.messages import Message, channel


@dataclass(frozen=True, slots=True)
class ProbeHello(Message):
    """Facts about the probe's host.

    `doctor_address` and `address` are the two ends of the ssh connection; None without ssh.
    """

    kind: ClassVar[str] = "hello"
    allstep: str
    python: str
    torch: str | None
    cores: dict[str, Any]
    memory: dict[str, Any]
    network: dict[str, Any]
    doctor_address: str | None
    address: str | None


@dataclass(frozen=True, slots=True)
class Listen(Message):
    """Request to serve a small store with this token on a free port."""

    kind: ClassVar[str] = "listen"
    token: str


@dataclass(frozen=True, slots=True)
class Listening(Message):
    """Answer to `Listen`: the port of the store."""

    kind: ClassVar[str] = "listening"
    port: int


@dataclass(frozen=True, slots=True)
class AskClock(Message):
    """Request for the time."""

    kind: ClassVar[str] = "clock"


@dataclass(frozen=True, slots=True)
class Clock(Message):
    """Answer to `AskClock`: the time on the probe's host, in seconds since 1970."""

    kind: ClassVar[str] = "clock"
    now: float


@dataclass(frozen=True, slots=True)
class Target:
    """A probe to reach: its label, and its addresses in the order to try."""

    label: str
    addresses: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Connect(Message):
    """Request to connect to the stores of other probes, within `seconds` each."""

    kind: ClassVar[str] = "connect"
    token: str
    targets: tuple[Target, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Reached(Message):
    """Result of one connection attempt.

    `to` is the label of the target, `error` None on success, `interface` the local interface and
    `address` the address of the target that were used.
    """

    kind: ClassVar[str] = "reached"
    to: str
    error: str | None
    seconds: float
    interface: str | None
    address: str | None


TO_PROBE = channel(Listen, AskClock, Connect, same_version=False)
TO_DOCTOR = channel(ProbeHello, Listening, Clock, Reached, same_version=False)
