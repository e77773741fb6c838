"""What links and connections really deliver: constants by kind of transport, and texts of links.

The constants were chosen on the published series of `published_runs` (level 1 of `levels`), one set
for all of them. A link that resembles none of these delivers something else.
"""

import re
from dataclasses import dataclass
from math import inf, isfinite

from allstep.costs.speed import Speed
from allstep.errors import ConfigError

NOMINAL_LATENCY = 10e-6
"""Seconds of a message on a link of which only the rate is known."""


@dataclass(frozen=True)
class Transport:
    """How a library uses a link: the part of the nominal rate that it reaches, at most `ceiling`.

    `ceiling` is in bytes/s for a host, `latency` in seconds.
    """

    fraction: float
    ceiling: float
    latency: float

    def on(self, nominal: Speed) -> Speed:
        """Return the speed that a link of this nominal rate delivers."""
        rate = min(self.fraction * nominal.bandwidth, self.ceiling)
        return Speed(self.latency, rate, nominal.adding)


TRANSPORTS = {
    "rdma": Transport(0.85, inf, 8e-6),
    "nccl": Transport(0.95, 2.7e9, 30e-6),  # over TCP, since NCCL 2.4
    "nccl-2.0": Transport(0.95, 1.9e9, 30e-6),  # over TCP, one socket
    "grpc": Transport(0.95, 1.3e9, 100e-6),
}
INSIDE = {
    "nvlink": Speed(4e-6, 35e9, inf),
    "pcie": Speed(6e-6, 9e9, inf),
    "pcie-k80": Speed(6e-6, 5e9, inf),
}

_LINK = re.compile(
    r"(?P<rate>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>[kKMGT]?)(?P<kind>bit(?:/s)?|B/s)"
    r"(?:/(?P<latency>[0-9]+(?:\.[0-9]+)?) ?(?P<time>us|ms|s))?"
)
_POWERS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def read_link(text: str, latency: float = NOMINAL_LATENCY) -> Speed:
    """Return the link that a text such as "10Gbit/25us", "1GB/s" or "100Mbit" names.

    latency: for a text without one. Raise ConfigError for another text.
    """
    found = _LINK.fullmatch(text.strip())
    rate = 0.0
    if found is not None and len(text) < 100:
        rate = float(found["rate"]) * _POWERS[found["unit"]]
        rate /= 8 if found["kind"].startswith("bit") else 1
        if found["latency"] is not None:
            latency = float(found["latency"]) * _TIMES[found["time"]]
    if not (rate > 0 and isfinite(rate) and isfinite(latency)):
        raise ConfigError(
            f"link {text!r}: expected a rate and perhaps a latency, such as 10Gbit/25us, 1GB/s or"
            " 100Mbit"
        )
    return Speed(latency, rate, inf)
