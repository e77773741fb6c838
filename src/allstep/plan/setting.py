"""What a step is simulated from: profile of one worker, cluster, policy. All values are frozen.

```
profile    one worker: forward, when which gradient is ready, update, input
cluster    hosts x workers, the link between hosts, the connection inside, jitter, a slow worker
policy     algorithm, buckets, overlap, bytes per gradient element, servers
```
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from allstep.costs.speed import Speed
from allstep.plan.models import Layer

_FORWARD = 1 / 3
"""Part of the computation that is the forward pass, where only the total is known."""


@dataclass(frozen=True)
class Gradient:
    """A gradient: its bytes, when it is ready, and when its layer begins its forward pass."""

    nbytes: float
    ready: float
    """Seconds from the start of the step."""
    needed: float = 0.0
    """Seconds from the start of the forward pass until its layer reads the weights."""


@dataclass(frozen=True)
class Profile:
    """A step of one worker with its share of the batch, alone."""

    forward: float
    backward: float
    gradients: tuple[Gradient, ...]
    """In forward order."""
    update: float = 0.0
    input: float = 0.0
    """Seconds in which the input pipeline provides a share."""

    @property
    def nbytes(self) -> float:
        """Bytes of all gradients."""
        return sum(each.nbytes for each in self.gradients)

    def slowed(self, factor: float) -> "Profile":
        """Return the profile of a worker whose computation takes `factor` times as long."""
        gradients = tuple(
            Gradient(each.nbytes, factor * each.ready, factor * each.needed)
            for each in self.gradients
        )
        return Profile(
            factor * self.forward, factor * self.backward, gradients, self.update, self.input
        )


def profile_from_speed(
    layers: Sequence[Layer], batch: int, samples_per_second: float, element: int = 4
) -> Profile:
    """Return the profile of a worker of which only the speed alone is known.

    A third of the time is forward, the rest backward, both spread over the layers by their
    operations. element: bytes of one element of a gradient.
    """
    seconds = batch / samples_per_second
    forward, flop = _FORWARD * seconds, sum(each.flop for each in layers)
    gradients, done = [], 0.0
    for layer in layers:
        # The backward pass comes to this layer after all later ones.
        rest = 1 - done / flop
        ready = forward + (seconds - forward) * rest
        gradients.append(Gradient(element * layer.parameters, ready, forward * done / flop))
        done += layer.flop
    return Profile(forward, seconds - forward, tuple(gradients))


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with equal workers, except for jitter and one worker that may be slow."""

    hosts: int
    per_host: int
    link: Speed
    """Between hosts."""
    inside: Speed
    """Between the workers of a host."""
    jitter: float = 0.0
    """Std of a worker's step time, relative to the mean."""
    slow: float = 1.0
    """Factor by which one worker always takes longer."""

    @property
    def size(self) -> int:
        """Workers of all hosts."""
        return self.hosts * self.per_host

    @property
    def slowest(self) -> float:
        """Mean time of the slowest worker of a step, relative to the mean of all (Blom)."""
        if self.size == 1:
            return self.slow
        place = (self.size - 0.375) / (self.size + 0.25)
        return max(1.0 + self.jitter * NormalDist().inv_cdf(place), self.slow)


@dataclass(frozen=True)
class Buckets:
    """Gradients that are reduced together, each bucket of at most `limit` bytes.

    first: limit of the first bucket; 0: as the others. tick: seconds between two times at which
    Horovod collects all gradients that are ready; 0: a bucket starts when it is full.
    """

    limit: float = 25 * 2**20
    first: float = 0.0
    tick: float = 0.0


ALLSTEP = Buckets()
DDP = Buckets(first=2**20)
HOROVOD_2017 = Buckets(limit=64 * 2**20, tick=5e-3)
HOROVOD_2021 = Buckets(limit=128 * 2**20, tick=1e-3)


@dataclass(frozen=True)
class Servers:
    """Parameter servers instead of an allreduce.

    count: 0 is one server per host. sum_in_host: the workers of a host push one sum. split: each
    tensor is cut into equal parts for all servers.
    """

    count: int = 0
    sum_in_host: bool = False
    split: bool = False


@dataclass(frozen=True)
class Policy:
    """How gradients travel.

    algorithm: `flat_ring`, or the name of an algorithm over the hosts after sums inside each host.
    overlap: whether buckets start during the backward pass. launch: seconds to start one bucket.
    """

    algorithm: str = "auto"
    buckets: Buckets = ALLSTEP
    overlap: bool = True
    launch: float = 0.0
    servers: Servers | None = None
