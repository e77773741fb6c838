"""How fast a link is, in the three numbers that every cost formula here is made of.

The usual model of message passing, with its Greek names:

    alpha  `latency`     seconds from sending a message to having it, however small it is beta
    1/`bandwidth` seconds for each byte of it (a host sends and receives at the same time at this
    rate) gamma  1/`adding`    seconds to combine each byte with one of our own

A message of n bytes takes `alpha + n * beta`, and a host sends one message at a time and receives
one at a time.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """A link and the processors at its ends. See `measure.measure_speed`."""

    latency: float  # seconds
    bandwidth: float  # bytes/s in each direction
    adding: float  # bytes/s

    def moving(self, nbytes: float) -> float:
        """Seconds that one message of so many bytes takes."""
        return self.latency + nbytes / self.bandwidth

    def combining(self, nbytes: float) -> float:
        """Seconds to add so many received bytes to our own."""
        return nbytes / self.adding
