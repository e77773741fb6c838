"""The speed of a number of workers, and the parts of its step, from a calibration.

```
Calibration ──> Knowledge ──┐
                Question  ──┴──> predict(..., workers) ──> Prediction: samples/s, parts of the step
```

A step of `workers` workers takes longer than that of one with the same share of the batch. The
parts explain it, and add up to the step:

    compute      forward and backward of one worker that has the machine to itself
    contention   what these take longer while the other workers of the host compute, too
    imbalance    what the slowest worker of the step takes longer
    exposed      communication that no computation hides, headers and messages
    update       of the weights
    input        what the input pipeline takes longer than all of this
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf

from allstep.costs.speed import Speed
from allstep.plan.calibration import Calibration, profile_at
from allstep.plan.knowledge import Knowledge, measured_parts
from allstep.plan.setting import ALLSTEP, Cluster, Gradient, Policy, Profile
from allstep.plan.simulator import AUTO, Step, allreduce, best_algorithm, step
from allstep.plan.solve import SLOWEST_LINK, falling_to

Taken = Callable[[Knowledge], float]
# What a bisection leaves.
_SAME = 1 + 1e-6
PARTS = ("compute", "contention", "imbalance", "exposed", "update", "input")


@dataclass(frozen=True)
class Question:
    """What is asked: the batch, the cluster, and what would be changed about it.

    Exactly one of `batch` (strong scaling) and `batch_per_worker` (weak scaling) is set.
    """

    per_host: int
    batch: int | None = None
    """Samples of a step over all workers."""
    batch_per_worker: int | None = None
    link: Speed | None = None
    """Between hosts; None: the measured one."""
    inside: Speed | None = None
    jitter: float | None = None
    slow: float | None = None
    """Factor by which one worker always takes longer; None: as measured."""
    slow_rank: int = 0
    """The rank of that worker: fewer workers do not have it."""
    algorithm: str = AUTO
    gradients: float = 1.0
    """Bytes sent for each byte of a gradient."""
    input: float = 1.0
    """Speed of the input pipeline, relative to the measured one."""
    link_rate: float = 1.0
    """Rate of the link, relative to the known one."""
    latency: float = 1.0
    """Latency of the link, relative to the known one."""

    def of_step(self, workers: int) -> int:
        """Return the samples of a step of this many workers."""
        if self.batch_per_worker is not None:
            return workers * self.batch_per_worker
        assert self.batch is not None
        return self.batch

    def share(self, workers: int) -> int:
        """Return the samples of the largest share of a step."""
        return ceil(self.of_step(workers) / workers)


@dataclass(frozen=True)
class Prediction:
    """The step of a number of workers."""

    workers: int
    hosts: int
    batch: int
    """Samples of a step over all workers."""
    parts: Mapping[str, float]
    """Seconds of a step by part (`PARTS`)."""
    algorithm: str
    num_train: int

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def samples_per_second(self) -> float:
        """Speed of all workers."""
        return self.batch / self.seconds

    @property
    def epoch(self) -> float:
        """Seconds of an epoch; the last step of it may have fewer samples."""
        return self.num_train / self.samples_per_second


def predict(
    calibration: Calibration, known: Knowledge, question: Question, workers: int
) -> Prediction:
    """Return the step of `workers` workers."""
    cluster = cluster_of(known, question, workers)
    alone = profile_at(calibration, question.share(workers)).slowed(known.alone)
    busy = _busy(calibration, known, question, cluster, alone)
    policy = Policy(
        question.algorithm,
        replace(ALLSTEP, limit=question.gradients * ALLSTEP.limit),
        # On one host gradients are summed after the backward pass.
        overlap=cluster.hosts > 1,
    )
    found = step(busy, cluster, policy)
    overhead = known.overhead if workers > 1 else 0.0
    return Prediction(
        workers=workers,
        hosts=cluster.hosts,
        batch=question.of_step(workers),
        parts=_parts(found, alone, overhead),
        algorithm=found.algorithm if cluster.hosts > 1 else "",
        num_train=calibration.num_train,
    )


def _parts(found: Step, alone: Profile, overhead: float) -> dict[str, float]:
    compute = alone.forward + alone.backward
    # Time that the input takes longer covers the overhead first.
    exposed = max(0.0, found.exposed + overhead)
    late = max(0.0, found.input - (exposed - found.exposed))
    values = (compute, found.compute - compute, found.imbalance, exposed, found.update, late)
    return dict(zip(PARTS, values, strict=True))


def cluster_of(known: Knowledge, question: Question, workers: int) -> Cluster:
    """Return the cluster of this many workers: as few hosts as they need."""
    hosts = ceil(workers / question.per_host)
    link = question.link or known.link or Speed(0.0, inf, inf)
    link = Speed(question.latency * link.latency, question.link_rate * link.bandwidth, link.adding)
    return Cluster(
        hosts,
        ceil(workers / hosts),
        link,
        question.inside or known.inside,
        known.jitter if question.jitter is None else question.jitter,
        _slowest(known, question, workers),
    )


def _slowest(known: Knowledge, question: Question, workers: int) -> float:
    """Return the factor of a worker that is always slower, if the cluster has it."""
    if question.slow is not None:
        return question.slow if question.slow_rank < workers else 1.0
    return known.slow if known.slowest is not None and known.slowest < workers else 1.0


def _busy(
    calibration: Calibration,
    known: Knowledge,
    question: Question,
    cluster: Cluster,
    alone: Profile,
) -> Profile:
    """Return the profile of a worker whose host is busy, and what it sends."""
    beyond = known.beyond if cluster.hosts > 1 else 1.0
    busy = alone.slowed(beyond * known.contention_of(cluster.per_host))
    update = busy.update * known.update_of(cluster.per_host)
    supply = busy.input * known.input_of(cluster.per_host) / question.input
    sent = question.gradients
    if calibration.shares_weights and cluster.hosts == 1 and cluster.per_host > 1:
        # Each worker updates its part, and gets no other sums than those of its part.
        update, sent = update / cluster.per_host, sent / 2
    gradients = tuple(
        Gradient(sent * each.nbytes, each.ready, each.needed) for each in busy.gradients
    )
    return replace(busy, gradients=gradients, update=update, input=supply)


def knowledge(calibration: Calibration) -> Knowledge:
    """Return all that a calibration shows, steps of workers together included."""
    known, host, hosts = measured_parts(calibration), calibration.host, calibration.hosts
    if host is not None and host.together is not None:
        asked = Question(host.workers, batch_per_worker=host.independent.batch)
        known = fitted(calibration, known, asked, host.workers, host.together)
    if hosts is not None:
        known = _with_sums(calibration, known)
        if hosts.together is not None:
            asked = Question(hosts.per_host, batch_per_worker=hosts.batch)
            known = fitted(calibration, known, asked, hosts.size, hosts.together)
    return known


@dataclass(frozen=True)
class Check:
    """A step that was measured, and how it is predicted from all other measurements."""

    workers: int
    hosts: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


def checks(calibration: Calibration) -> list[Check]:
    """Predict each measured step of workers together from what was measured before it.

    These are one worker, independent copies and timed allreduces; over several hosts also the step
    of one host.
    """
    known, host, hosts = measured_parts(calibration), calibration.host, calibration.hosts
    found = []
    if host is not None and host.together is not None:
        asked = Question(host.workers, batch_per_worker=host.independent.batch)
        predicted = predict(calibration, known, asked, host.workers).seconds
        found.append(Check(host.workers, 1, predicted, host.together))
        known = fitted(calibration, known, asked, host.workers, host.together)
    if hosts is not None and hosts.together is not None:
        asked = Question(hosts.per_host, batch_per_worker=hosts.batch)
        predicted = predict(calibration, _with_sums(calibration, known), asked, hosts.size).seconds
        found.append(Check(hosts.size, hosts.hosts, predicted, hosts.together))
    return found


def _with_sums(calibration: Calibration, known: Knowledge) -> Knowledge:
    """Return `known` with the rate of the link that explains the largest timed allreduce."""
    hosts = calibration.hosts
    if hosts is None or not hosts.sums or known.link is None:
        return known
    nbytes, seconds = max(hosts.sums)
    link = known.link

    def taken(rate: float) -> float:
        cluster = Cluster(hosts.hosts, hosts.per_host, replace(link, bandwidth=rate), known.inside)
        return allreduce(nbytes, cluster, best_algorithm(nbytes, cluster))

    rate = falling_to(taken, seconds, SLOWEST_LINK, 100 * link.bandwidth)
    return replace(known, link=replace(link, bandwidth=rate))


def fitted(
    calibration: Calibration, known: Knowledge, question: Question, workers: int, seconds: float
) -> Knowledge:
    """Return `known` so that a step of `workers` workers is predicted as it was measured.

    The difference is put on the computation of one worker, on the seconds that a step of several
    workers of one host takes longer, or, over several hosts, on the link; where an allreduce was
    timed between the hosts, the link is known, and it is put on the computation.
    """
    known = replace(known, checked=max(known.checked, workers))

    def taken(known: Knowledge) -> float:
        return predict(calibration, known, question, workers).seconds

    if workers == 1:
        return _slower(lambda each: replace(known, alone=each), taken, seconds)
    if cluster_of(known, question, workers).hosts == 1:
        known = replace(known, level=max(known.level, 2), overhead=0.0)
        more = seconds - taken(known)
        return replace(known, overhead=more) if more >= 0 else _faster_host(known, taken, seconds)
    known = replace(known, level=3, link=question.link or known.link)
    question = replace(question, link=None)
    is_timed = calibration.hosts is not None and bool(calibration.hosts.sums)
    return _over_hosts(known, taken, seconds, is_timed)


def _faster_host(known: Knowledge, taken: Taken, seconds: float) -> Knowledge:
    """Return `known` for workers of a host that are faster together than predicted.

    The sums inside the host are, then; only what they do not explain is put on the computation.
    """

    def with_sums(factor: float) -> Knowledge:
        inside = known.inside
        quicker = Speed(inside.latency / factor, inside.bandwidth * factor, inside.adding)
        return replace(known, inside=quicker)

    found = with_sums(falling_to(lambda each: taken(with_sums(each)), seconds, 1.0, 100.0))
    if taken(found) <= seconds * _SAME:
        return found
    return _slower(lambda each: replace(found, contention=each), taken, seconds)


def _over_hosts(known: Knowledge, taken: Taken, seconds: float, is_timed: bool) -> Knowledge:
    """Return `known` for a step over several hosts.

    is_timed: the link was measured, so that a slower step is due to something else, and a faster
    one shows that the link is better than when it was measured.
    """
    link = known.link
    if link is None or (is_timed and taken(known) <= seconds):
        return _slower(lambda each: replace(known, beyond=each), taken, seconds)

    def at_rate(rate: float) -> Knowledge:
        return replace(known, link=replace(link, bandwidth=rate))

    def improved(factor: float) -> Knowledge:
        better = Speed(link.latency / factor, factor * link.bandwidth, link.adding)
        return replace(known, link=better)

    if not is_timed:
        # At most the nominal rate.
        return at_rate(
            falling_to(lambda each: taken(at_rate(each)), seconds, SLOWEST_LINK, link.bandwidth)
        )
    found = improved(falling_to(lambda each: taken(improved(each)), seconds, 1.0, 100.0))
    if taken(found) <= seconds * _SAME:
        return found
    return _slower(lambda each: replace(found, beyond=each), taken, seconds)


def _slower(changed: Callable[[float], Knowledge], taken: Taken, seconds: float) -> Knowledge:
    """Return `known` with the factor that gives a step the measured seconds."""
    return changed(falling_to(lambda each: -taken(changed(each)), -seconds, 1e-3, 1e3))
