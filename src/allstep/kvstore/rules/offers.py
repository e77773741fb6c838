"""Copies that parties offer when a server is lost, and which one continues.

An offer has, for a part, the *epoch* of the party's copy (how many servers had stored the part
before), its version, and the updates that the party has sent to the server that is lost. The
freshest copy wins: the largest epoch, then the largest version, then the lowest rank. The updates
that were sent and are not in it are lost.
"""

from collections.abc import Mapping
from typing import NamedTuple

NONE = -1
"""Version of a party that has no copy."""


class Offer(NamedTuple):
    """What a party has of a part. sent: updates that it has sent in the epoch of its copy."""

    epoch: int
    version: int
    sent: int


def freshest(offers: Mapping[int, Offer]) -> int | None:
    """Return the party with the freshest copy; None if no party has one."""
    having = [party for party, each in offers.items() if each.version != NONE]
    return max(
        having, key=lambda party: (offers[party].epoch, offers[party].version, -party), default=None
    )


def num_lost(offers: Mapping[int, Offer], chosen: int) -> int:
    """Return the updates that are not in the chosen copy, as far as offers show."""
    best = offers[chosen]
    sent = sum(each.sent for each in offers.values() if each.epoch == best.epoch)
    return max(0, sent - best.version)
