"""The configurations of `allstep bench plan`, and what the planner predicts for each.

A configuration is a number of hosts and workers, a shaped link, the limit of a bucket, the layers
of the model and perhaps a slow worker. The prediction starts from the configured rate of the link
and the cost of a message, which is measured once for all configurations; nothing is fitted.

**The burst.** The shaper of a link, a token bucket, refills while the link is idle, above all
during the forward pass, and lets as many bytes pass at once. They are subtracted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from allstep.costs.allreduce import COSTS, cheapest
from allstep.costs.speed import Speed
from allstep.plan.fused_gradients import buckets_of
from allstep.plan.setting import Buckets, Cluster, Gradient, Policy, Profile
from allstep.plan.simulator import Step, allreduce, best_algorithm, step

Layer = tuple[int, float, float]
"""Bytes of the weights, forward seconds, backward seconds."""

WIRE = 0.953
"""Part of a link's bytes that are data: 1,448 of 1,514 of a packet, less acknowledgments."""
_HEADER = 72
"""Bytes that the ranks exchange before the gradients of a bucket (`parallel.exchange.header`)."""
_FREE = Speed(0.0, inf, inf)
_MB = 1_000_000
_ONE = 25 << 20
"""A limit above all gradients: one bucket."""
_SEPARATE = Buckets(limit=0.0)
"""Each gradient is a bucket."""
_EQUAL: tuple[Layer, ...] = ((_MB, 0.02, 0.05),) * 4
_UNEQUAL: tuple[Layer, ...] = tuple(
    (nbytes, 0.02, 0.05) for nbytes in (_MB // 2, _MB // 2, 6 * _MB, _MB)
)


@dataclass(frozen=True)
class Configuration:
    """A cluster and a model of the test bench."""

    hosts: int
    per_host: int
    mbit: int
    """Rate of each host's link, in Mbit/s in each direction."""
    burst: int
    """Bytes that the link lets pass at once after a pause."""
    limit: int
    """Bytes of a bucket."""
    layers: tuple[Layer, ...] = _EQUAL
    slow: float = 1.0
    """How many times as long the last worker takes."""
    judged: bool = True
    """Whether the error has a target."""

    @property
    def size(self) -> int:
        """Workers of all hosts."""
        return self.hosts * self.per_host

    @property
    def buckets(self) -> int:
        """Number of buckets of a step."""
        return sum(1 for _ in buckets_of(profile_of(self.layers).gradients, Buckets(self.limit)))

    @property
    def name(self) -> str:
        """The configuration as a short text."""
        link = f"{self.mbit} Mbit/s, burst {self.burst >> 10} KB"
        buckets = "1 bucket" if self.buckets == 1 else f"{self.buckets} buckets"
        parts = [f"{self.hosts} x {self.per_host}", link, buckets]
        if self.layers != _EQUAL:
            parts.append("unequal layers")
        if self.slow != 1.0:
            parts.append(f"one worker {self.slow:g} times slower")
        return ", ".join(parts)


_LARGE, _SMALL = 512 << 10, 64 << 10
CONFIGURATIONS = (
    Configuration(2, 1, 100, _LARGE, _MB),
    Configuration(4, 1, 100, _LARGE, _MB),
    Configuration(4, 1, 100, _LARGE, _ONE),
    Configuration(2, 2, 100, _LARGE, _ONE),
    Configuration(4, 2, 100, _LARGE, _MB),
    Configuration(4, 1, 100, _LARGE, 2 * _MB, _UNEQUAL, slow=1.3),
    Configuration(8, 1, 100, _LARGE, _MB),
    Configuration(8, 1, 50, _LARGE, _ONE),
    Configuration(2, 1, 100, _SMALL, _MB),
    Configuration(4, 1, 100, _SMALL, _MB, slow=1.5),
    Configuration(16, 1, 50, _LARGE, _ONE, judged=False),
)
LARGEST = 8
"""Workers of the largest configuration that is measured by default."""


def chosen(largest: int) -> list[Configuration]:
    """Return the configurations of at most `largest` workers."""
    return [each for each in CONFIGURATIONS if each.size <= largest]


def profile_of(layers: Sequence[Layer]) -> Profile:
    """Return the profile of a worker with these layers."""
    forward, backward = sum(each[1] for each in layers), sum(each[2] for each in layers)
    gradients, needed, rest = [], 0.0, backward
    for nbytes, ahead, back in layers:
        gradients.append(Gradient(nbytes, forward + rest, needed))
        needed, rest = needed + ahead, rest - back
    return Profile(forward, backward, tuple(gradients))


def sleeping_layers(profile: Profile) -> list[Layer]:
    """Return layers that sleep as long as those of `profile` compute, and have their gradients."""
    found: list[Layer] = []
    begins = [each.needed for each in profile.gradients[1:]] + [profile.forward]
    readies = [each.ready for each in profile.gradients[1:]] + [profile.forward]
    for each, end, later in zip(profile.gradients, begins, readies, strict=True):
        found.append((int(each.nbytes), end - each.needed, each.ready - later))
    return found


def predict(each: Configuration, message: float, *, count_burst: bool = True) -> Step:
    """Return the predicted step of a configuration. message: seconds of a message of few bytes."""
    rate = WIRE * each.mbit * 1e6 / 8
    link = Speed(message, rate, inf)
    cluster = Cluster(each.hosts, each.per_host, link, _FREE, slow=each.slow)
    profile, buckets = profile_of(each.layers), Buckets(each.limit)
    header = COSTS[cheapest(each.hosts, _HEADER, link)](each.hosts, _HEADER, link)
    policy = Policy(best_algorithm(profile.nbytes, cluster), buckets, launch=header)
    if count_burst:
        profile = _less_bursts(profile, cluster, policy, WIRE * each.burst)
        policy = replace(policy, buckets=_SEPARATE)
    return step(profile, cluster, policy)


def _less_bursts(profile: Profile, cluster: Cluster, policy: Policy, burst: float) -> Profile:
    """Return a profile with one gradient for each bucket, less the bytes that pass at once.

    Tokens of the link's bucket grow at its rate while it is idle, up to `burst` bytes. A host sends
    2 (H - 1) / H of the bytes of an allreduce, so that many bytes cost a token.
    """
    rate, part = cluster.link.bandwidth, 2 * (cluster.hosts - 1) / cluster.hosts
    found: list[Gradient] = []
    tokens = end = 0.0
    slowest = profile.slowed(cluster.slowest)
    pairs = (buckets_of(each.gradients, policy.buckets) for each in (profile, slowest))
    for bucket, late in zip(*pairs, strict=True):
        start = max(end, late.ready)
        tokens = min(burst, tokens + rate * (start - end))
        free = min(bucket.nbytes, tokens / part)
        tokens -= part * free
        nbytes = bucket.nbytes - free
        end = start + allreduce(nbytes, cluster, policy.algorithm) + policy.launch
        found.append(Gradient(nbytes, bucket.ready))
    return replace(profile, gradients=tuple(reversed(found)))
