"""The speed of a link: the three numbers of which every cost formula here is made.

The usual model of message passing, with its Greek names:

    alpha  `latency`      seconds from sending a message to receiving it, however small it is
    beta   1/`bandwidth`  seconds for each byte (a host sends and receives at this rate at once)
    gamma  1/`adding`     seconds to combine each byte with one of our own

A message of n bytes takes `alpha + n * beta`. A host sends one message at a time and receives one
at a time.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """A link and the processors at its ends. See `comm.network.algorithms.measure_link`."""

    latency: float  # seconds
    bandwidth: float  # bytes/s in each direction
    adding: float  # bytes/s

    def moving(self, nbytes: float) -> float:
        """Return the seconds that one message of `nbytes` takes."""
        return self.latency + nbytes / self.bandwidth

    def combining(self, nbytes: float) -> float:
        """Return the seconds to add `nbytes` received bytes to our own."""
        return nbytes / self.adding
