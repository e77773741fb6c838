"""Predictions by how much is known: the levels of D22, each with the error to expect.

```
0  one worker's speed, bytes per tensor, nominal link    within a factor of 2
1  + the kind of transport (`transports`)                5% if the link resembles those
2  + one full host, all its workers at once              what a host loses inside is known
3  + one run on several hosts                            5%; nine in ten points within 10%
```

At level 2 the difference of a full host is put on the computation. At level 3 the difference of the
smallest run on several hosts is put on the rate of the link, which is at most the nominal one: that
predicts larger runs better than a factor on the computation does.
"""

from dataclasses import dataclass, replace

from allstep.costs.speed import Speed
from allstep.plan.published_runs import PublishedRun
from allstep.plan.setting import Cluster, Servers
from allstep.plan.simulator import Step, step
from allstep.plan.solve import SLOWEST_LINK, falling_to

LEVELS = (0, 1, 2, 3)
NAMES = (
    "one worker and the nominal link",
    "one worker and the kind of transport",
    "one full host",
    "one run on several hosts",
)
ERRORS = (
    "within a factor of 2",
    "about 5% on links that resemble those of the table, unknown on others",
    "about 5% on links that resemble those of the table, unknown on others",
    "about 5% in the median, nine in ten points within 10%",
)
JITTER = 0.02
"""Std of a worker's step time where it was not measured."""
LIBRARY = 1.02
"""Factor for what a step with a library takes longer, where no full host was measured."""


@dataclass(frozen=True)
class Known:
    """What a level knows: the link, the jitter, and the factor on computation and whole step."""

    link: Speed
    jitter: float
    compute: float = 1.0
    whole: float = 1.0


def level_of(run: PublishedRun) -> int:
    """Return the highest level at which a run's points can be predicted."""
    if run.extrapolates:
        return 3
    if run.host is not None:
        return 2
    return 0 if run.transport is None else 1


def samples_per_second(run: PublishedRun, hosts: int, known: Known) -> float:
    """Return the speed of a series on `hosts` hosts."""
    workers = hosts * run.workers_per_host
    return workers * run.batch_per_worker / (_step(run, hosts, known).seconds * known.whole)


def predict(run: PublishedRun, level: int) -> dict[int, float]:
    """Return the predicted samples/s by number of hosts; empty if too little is known.

    At level 3 the smallest point is what the prediction was fitted to, and is left out.
    """
    known = knowledge(run, level)
    if known is None:
        return {}
    first = min(run.points)
    hosts = [each for each in run.points if level < 3 or each != first]
    return {each: samples_per_second(run, each, known) for each in hosts}


def constant_efficiency(run: PublishedRun) -> dict[int, float]:
    """Return the guess to beat: the efficiency of the smallest run on several hosts stays."""
    first = min(run.points)
    return {hosts: run.points[first] * hosts / first for hosts in run.points if hosts != first}


def knowledge(run: PublishedRun, level: int) -> Known | None:
    """Return what is known about a series at a level; None if it lacks what the level needs."""
    if level == 0:
        return Known(run.link, 0.0)
    link = run.link if run.transport is None else run.transport.on(run.link)
    known = Known(link, JITTER, whole=LIBRARY)
    if level == 1:
        return None if run.transport is None else known
    if run.host is not None:
        known = fit_host(run, replace(known, whole=1.0))
    elif level == 2:
        return None
    if level == 2:
        return known
    return fit_hosts(run, known) if run.extrapolates else None


def fit_host(run: PublishedRun, known: Known) -> Known:
    """Return `known` with the factor on the computation that explains one full host."""
    assert run.host is not None

    def speed(factor: float) -> float:
        return samples_per_second(run, 1, replace(known, compute=factor))

    return replace(known, compute=falling_to(speed, run.host, 0.2, 20.0))


def fit_hosts(run: PublishedRun, known: Known) -> Known:
    """Return `known` with the rate of the link that explains the smallest run on several hosts.

    The rate is at most the nominal one.
    """
    hosts = min(run.points)
    found = run.points[hosts]

    def speed(known: Known) -> float:
        return samples_per_second(run, hosts, known)

    def with_rate(rate: float) -> Known:
        return replace(known, link=replace(known.link, bandwidth=rate))

    nominal = run.link.bandwidth
    if speed(with_rate(nominal)) <= found:
        return with_rate(nominal)
    return with_rate(
        falling_to(lambda rate: -speed(with_rate(rate)), -found, SLOWEST_LINK, nominal)
    )


def _step(run: PublishedRun, hosts: int, known: Known) -> Step:
    cluster = Cluster(hosts, run.workers_per_host, known.link, run.inside, known.jitter)
    policy = run.policy
    if policy.servers is not None and hosts in run.servers:
        servers: Servers = replace(policy.servers, count=run.servers[hosts])
        policy = replace(policy, servers=servers)
    return step(run.profile.slowed(known.compute), cluster, policy)
