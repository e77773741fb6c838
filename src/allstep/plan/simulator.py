"""The time of one training step on a cluster, and its parts.

```
forward  ->  backward: gradient i is ready at time r_i, last layer first  ->  update
                 buckets in that order on one channel:
                 start_k = max(ready_k, end_k-1),  end_k = start_k + cost(bytes_k) + launch

step = max((forward + backward) x slowest, end of the last bucket) + update,
       and at least the time of the input
```

All workers are equal except for jitter, so one timeline is enough: that of the slowest
worker of the step. Parameter servers need a queue each (`servers`).
"""

from dataclasses import dataclass

from allstep.costs.allreduce import COSTS, by_slice, cheapest, flat_ring
from allstep.plan.fused_gradients import buckets_of, by_ticks
from allstep.plan.servers import exposed_by_servers
from allstep.plan.setting import Cluster, Policy, Profile

FLAT_RING = "flat_ring"
AUTO = "auto"
ALGORITHMS = (AUTO, FLAT_RING, *COSTS)
"""Names that `Policy.algorithm` may have."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step by part; they add up to `seconds`."""

    compute: float
    """Forward and backward of a worker of mean speed."""
    imbalance: float
    """What the slowest worker takes longer."""
    exposed: float
    """Communication that no computation hides."""
    update: float
    input: float
    """What the input pipeline takes longer than all of this."""
    algorithm: str = ""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.imbalance + self.exposed + self.update + self.input


def step(profile: Profile, cluster: Cluster, policy: Policy) -> Step:
    """Return the parts of a step of `cluster`, each of whose workers alone has `profile`."""
    slowest = profile.slowed(cluster.slowest)
    compute, slow = (each.forward + each.backward for each in (profile, slowest))
    algorithm, exposed = "", 0.0
    if cluster.size > 1 and profile.nbytes:
        if policy.servers is not None:
            algorithm, exposed = "servers", exposed_by_servers(slowest, cluster, policy.servers)
        else:
            algorithm = policy.algorithm
            if algorithm == AUTO:
                algorithm = best_algorithm(profile.nbytes, cluster)
            exposed = _exposed_by_buckets(slowest, cluster, policy, algorithm)
    busy = slow + exposed + profile.update
    late = max(0.0, profile.input - busy)
    return Step(compute, slow - compute, exposed, profile.update, late, algorithm)


def allreduce(nbytes: float, cluster: Cluster, algorithm: str) -> float:
    """Return the seconds of one allreduce over all workers."""
    hosts, per_host = cluster.hosts, cluster.per_host
    if algorithm == FLAT_RING:
        return flat_ring(hosts, per_host, nbytes, cluster.link, cluster.inside)
    return by_slice(hosts, per_host, nbytes, cluster.link, cluster.inside, COSTS[algorithm])


def best_algorithm(nbytes: float, cluster: Cluster) -> str:
    """Return the algorithm over the hosts that allstep chooses for `nbytes`."""
    return cheapest(cluster.hosts, nbytes / cluster.per_host, cluster.link)


def _exposed_by_buckets(
    slowest: Profile, cluster: Cluster, policy: Policy, algorithm: str
) -> float:
    """Return the seconds from the end of the backward pass to the end of the last bucket."""
    end_of_backward = slowest.forward + slowest.backward

    def seconds(nbytes: float) -> float:
        return allreduce(nbytes, cluster, algorithm) + policy.launch

    if policy.buckets.tick:
        earliest = 0.0 if policy.overlap else end_of_backward
        end = by_ticks(slowest.gradients, policy.buckets, seconds, earliest)
    else:
        end = 0.0
        for bucket in buckets_of(slowest.gradients, policy.buckets):
            ready = bucket.ready if policy.overlap else end_of_backward
            end = max(ready, end) + seconds(bucket.nbytes)
    return max(0.0, end - end_of_backward)
