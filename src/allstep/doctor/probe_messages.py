"""The messages between the doctor and its probes; `launch.messages` has the format and the checks.

========  ======================================================================================
to it     `Listen`, `AskClock`, `Connect`
from it   `ProbeHello`, `Listening`, `Clock`, `Reached` (one for each target of `Connect`)
========  ======================================================================================

A probe of another version is not refused: that versions differ is one of the doctor's findings.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from allstep.launch.messages import Message, channel


@dataclass(frozen=True, slots=True)
class ProbeHello(Message):
    """What the probe finds on its host. doctor_address, address: as ssh shows both ends."""

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
    """Serve a small store with this token on a fresh port."""

    kind: ClassVar[str] = "listen"
    token: str


@dataclass(frozen=True, slots=True)
class Listening(Message):
    """The store is there."""

    kind: ClassVar[str] = "listening"
    port: int


@dataclass(frozen=True, slots=True)
class AskClock(Message):
    """Return the time."""

    kind: ClassVar[str] = "clock"


@dataclass(frozen=True, slots=True)
class Clock(Message):
    """The time there, in seconds since 1970."""

    kind: ClassVar[str] = "clock"
    now: float


@dataclass(frozen=True, slots=True)
class Target:
    """A probe to reach: its label, and its addresses in the order to try."""

    label: str
    addresses: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Connect(Message):
    """Try to reach these probes, each within so many seconds."""

    kind: ClassVar[str] = "connect"
    token: str
    targets: tuple[Target, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Reached(Message):
    """How an attempt ended. error: None when it worked. interface, address: the way to it."""

    kind: ClassVar[str] = "reached"
    to: str
    error: str | None
    seconds: float
    interface: str | None
    address: str | None


TO_PROBE = channel(Listen, AskClock, Connect, same_version=False)
TO_DOCTOR = channel(ProbeHello, Listening, Clock, Reached, same_version=False)
