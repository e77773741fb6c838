"""The simulator of a step: properties that hold for every setting, and an oracle that simulates each
worker."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.comm.network.algorithms import ring
from allstep.costs.allreduce import COSTS, by_slice, flat_ring
from allstep.costs.speed import Speed
from allstep.plan.fused_gradients import buckets_of
from allstep.plan.models import MODELS, layers_of
from allstep.plan.setting import (
    HOROVOD_2017,
    Buckets,
    Cluster,
    Gradient,
    Policy,
    Profile,
    Servers,
    profile_from_speed,
)
from allstep.plan.simulator import ALGORITHMS, allreduce, step
from support.simulated_network import simulate

FREE = Speed(0.0, math.inf, math.inf)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """A worker with 1 to 12 layers."""
    number = draw(st.integers(1, 12))
    parts = [draw(st.floats(1e-4, 0.05)) for _ in range(number)]
    sizes = [draw(st.floats(1e3, 5e7)) for _ in range(number)]
    forward = sum(parts) / 2
    gradients, done = [], 0.0
    for part, nbytes in zip(parts, sizes, strict=True):
        gradients.append(Gradient(nbytes, forward + sum(parts) - done, done / 2))
        done += part
    update, wait = draw(st.floats(0, 0.01)), draw(st.floats(0, 0.05))
    return Profile(forward, sum(parts), tuple(gradients), update, wait)


speeds = st.builds(Speed, st.floats(0, 1e-3), st.floats(1e7, 1e11), st.just(math.inf))
clusters = st.builds(
    Cluster, st.integers(1, 40), st.integers(1, 8), speeds, speeds, st.floats(0, 0.1)
)
buckets = st.builds(Buckets, st.floats(1e4, 1e8), st.floats(0, 1e7))
allreduces = st.builds(Policy, st.sampled_from(ALGORITHMS), buckets, st.booleans())
servers = st.builds(
    Policy, servers=st.builds(Servers, st.integers(0, 20), st.booleans(), st.booleans())
)
ticked = st.builds(Policy, st.just("flat_ring"), st.just(HOROVOD_2017), st.booleans())
policies = st.one_of(allreduces, ticked, servers)


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


@given(profile=profiles(), cluster=clusters, policy=allreduces)
def test_a_step_is_between_computation_and_communication_and_their_sum(
    profile: Profile, cluster: Cluster, policy: Policy
) -> None:
    """With T2 the seconds of the buckets that really travel, one after the other."""
    profile = replace(profile, update=0.0, input=0.0)
    found = step(profile, cluster, policy)
    computation, communication = found.compute + found.imbalance, 0.0
    if cluster.size > 1:
        communication = sum(
            allreduce(each.nbytes, cluster, found.algorithm)
            for each in buckets_of(profile.gradients, policy.buckets)
        )
    assert max(computation, communication) <= found.seconds * (1 + 1e-9) + 1e-12
    assert found.seconds <= (computation + communication) * (1 + 1e-9) + 1e-12


@given(profile=profiles(), cluster=clusters, overlap=st.booleans())
def test_waiting_for_ticks_counts_as_communication(
    profile: Profile, cluster: Cluster, overlap: bool
) -> None:
    profile = replace(profile, update=0.0, input=0.0)
    policy = Policy("flat_ring", HOROVOD_2017, overlap)
    found = step(profile, cluster, policy)
    computation = found.compute + found.imbalance
    number = len(profile.gradients)
    # A bucket waits for the next tick; at most, each gradient is a bucket.
    communication = number * HOROVOD_2017.tick
    communication += sum(allreduce(each.nbytes, cluster, "flat_ring") for each in profile.gradients)
    assert computation * (1 - 1e-9) <= found.seconds <= computation + communication + 1e-9


@given(
    profile=profiles(),
    cluster=clusters,
    policy=allreduces,
    less=st.lists(st.floats(0, 1), min_size=12, max_size=12),
)
def test_fewer_bytes_with_the_same_buckets_are_never_slower(
    profile: Profile, cluster: Cluster, policy: Policy, less: list[float]
) -> None:
    """Each bucket is one gradient here. With other boundaries, fewer buckets may start later."""
    algorithm = "ring" if policy.algorithm == "auto" else policy.algorithm
    policy = replace(policy, algorithm=algorithm, buckets=Buckets(limit=0.0))
    smaller = tuple(
        replace(each, nbytes=part * each.nbytes)
        for each, part in zip(profile.gradients, less, strict=False)
    )
    fewer = step(replace(profile, gradients=smaller), cluster, policy).seconds
    assert fewer <= step(profile, cluster, policy).seconds * (1 + 1e-9) + 1e-12


@given(profile=profiles(), cluster=clusters, policy=policies)
def test_one_worker_costs_what_it_costs_alone(
    profile: Profile, cluster: Cluster, policy: Policy
) -> None:
    one = replace(cluster, hosts=1, per_host=1)
    alone = profile.forward + profile.backward + profile.update
    assert close(step(profile, one, policy).seconds, max(alone, profile.input))


@given(profile=profiles(), cluster=clusters, policy=policies, factor=st.floats(1, 10))
def test_better_hardware_is_never_slower(
    profile: Profile, cluster: Cluster, policy: Policy, factor: float
) -> None:
    if policy.algorithm == "auto":  # the choice is made for all bytes at once, not for a bucket
        policy = replace(policy, algorithm="ring")
    found = step(profile, cluster, policy).seconds
    slack = 1e-9
    if policy.buckets.tick and cluster.size > 1:
        # The boundaries of buckets depend on the speed: the end of a faster bucket may miss a
        # gradient, which then waits for a tick and travels alone. At most, all gradients do.
        alone = sum(allreduce(each.nbytes, cluster, "flat_ring") for each in profile.gradients)
        slack += policy.buckets.tick + alone
    for link in (
        replace(cluster.link, bandwidth=factor * cluster.link.bandwidth),
        replace(cluster.link, latency=cluster.link.latency / factor),
    ):
        assert step(profile, replace(cluster, link=link), policy).seconds <= found + slack
    calm = replace(cluster, jitter=cluster.jitter / factor)
    assert step(profile, calm, policy).seconds <= found + slack


@given(profile=profiles(), cluster=clusters, policy=allreduces)
def test_an_unlimited_link_leaves_computation_and_update(
    profile: Profile, cluster: Cluster, policy: Policy
) -> None:
    free = replace(cluster, link=FREE, inside=FREE)
    busy = (profile.forward + profile.backward) * free.slowest + profile.update
    assert close(step(profile, free, policy).seconds, max(busy, profile.input))


@given(profile=profiles(), cluster=clusters, policy=policies)
def test_doubling_all_times_doubles_the_step(
    profile: Profile, cluster: Cluster, policy: Policy
) -> None:
    twice = replace(profile.slowed(2), update=2 * profile.update, input=2 * profile.input)
    slow = replace(
        cluster,
        link=_half(cluster.link),
        inside=_half(cluster.inside),
    )
    late = replace(policy, buckets=replace(policy.buckets, tick=2 * policy.buckets.tick))
    found, doubled = step(profile, cluster, policy), step(twice, slow, late)
    assert math.isclose(doubled.seconds, 2 * found.seconds, rel_tol=1e-6)


def _half(speed: Speed) -> Speed:
    return Speed(2 * speed.latency, speed.bandwidth / 2, speed.adding)


@given(profile=profiles(), cluster=clusters, policy=policies)
def test_the_parts_are_not_negative(profile: Profile, cluster: Cluster, policy: Policy) -> None:
    found = step(profile, replace(cluster, slow=1.3), policy)
    parts = (found.compute, found.imbalance, found.exposed, found.update, found.input)
    assert min(parts) >= 0
    assert close(sum(parts), found.seconds)


# An oracle: every worker has a clock of its own


def oracle(
    profile: Profile, cluster: Cluster, limit: float, algorithm: str, factors: Sequence[float]
) -> float:
    """Return the seconds of a step by the clocks of all workers; bucket by bucket, no shortcut."""
    groups: list[list[Gradient]] = [[]]
    for each in reversed(profile.gradients):
        if groups[-1] and sum(one.nbytes for one in groups[-1]) + each.nbytes > limit:
            groups.append([])
        groups[-1].append(each)
    channel = [0.0] * len(factors)
    for group in groups:
        begins = [
            max(clock, factor * max(each.ready for each in group))
            for clock, factor in zip(channel, factors, strict=True)
        ]
        seconds = allreduce(sum(each.nbytes for each in group), cluster, algorithm)
        channel = [max(begins) + seconds] * len(factors)
    ends = [
        max(clock, factor * (profile.forward + profile.backward))
        for clock, factor in zip(channel, factors, strict=True)
    ]
    return max(ends) + profile.update


@given(profile=profiles(), cluster=clusters, limit=st.floats(1e4, 1e8))
def test_one_timeline_stands_for_all_workers(
    profile: Profile, cluster: Cluster, limit: float
) -> None:
    calm = replace(cluster, jitter=0.0, hosts=min(cluster.hosts, 4))
    if calm.size == 1:
        calm = replace(calm, hosts=2)
    profile = replace(profile, input=0.0)
    found = step(profile, calm, Policy("ring", Buckets(limit))).seconds
    assert close(found, oracle(profile, calm, limit, "ring", [1.0] * calm.size))
    slow = [1.5] + [1.0] * (calm.size - 1)
    found = step(profile, replace(calm, slow=1.5), Policy("ring", Buckets(limit))).seconds
    assert close(found, oracle(profile, calm, limit, "ring", slow))


def test_one_timeline_stands_for_all_workers_in_the_mean_with_jitter() -> None:
    profile = profile_from_speed(layers_of("resnet50"), 64, 219.0)
    draws = random.Random(1)
    for hosts, per_host in ((2, 4), (8, 4)):
        cluster = Cluster(
            hosts, per_host, Speed(1e-5, 1.25e9, math.inf), Speed(6e-6, 9e9, math.inf)
        )
        policy = Policy("ring", Buckets(25 * 2**20))
        found = step(profile, replace(cluster, jitter=0.02), policy).seconds
        drawn = []
        for _ in range(100):
            factors = [draws.gauss(1.0, 0.02) for _ in range(cluster.size)]
            drawn.append(oracle(profile, cluster, 25 * 2**20, "ring", factors))
        assert found == pytest.approx(fmean(drawn), rel=0.01)


def test_the_slowest_of_n_workers() -> None:
    draws = random.Random(2)
    for number in (2, 8, 64, 256):
        cluster = Cluster(number, 1, FREE, FREE, jitter=0.02)
        drawn = [max(draws.gauss(1, 0.02) for _ in range(number)) for _ in range(400)]
        assert cluster.slowest == pytest.approx(fmean(drawn), abs=0.002)


# Hosts with several workers, over the formulas of one link


@pytest.mark.parametrize("name", COSTS)
def test_a_slice_of_one_worker_per_host_is_the_algorithm_itself(name: str) -> None:
    link = Speed(1e-5, 1e9, 1e10)
    for hosts in (1, 2, 5, 16):
        found = by_slice(hosts, 1, 1e6, link, FREE, COSTS[name])
        assert found == COSTS[name](hosts, 1e6, link)


def test_a_flat_ring_carries_all_bytes_over_each_link() -> None:
    link, inside = Speed(1e-5, 1e9, math.inf), Speed(1e-6, 1e10, math.inf)
    seconds = 2 * 31 / 32 * (1e8 / 1e9 + 8 * 1e-5 + 24 * 1e-6)
    assert flat_ring(8, 4, 1e8, link, inside) == pytest.approx(seconds)
    assert flat_ring(1, 4, 1e8, link, inside) == pytest.approx(2 * 3 / 4 * (0.01 + 4e-6))
    assert flat_ring(1, 1, 1e8, link, inside) == flat_ring(8, 4, 0, link, inside) == 0


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 3), (5, 1), (4, 2)])
def test_a_flat_ring_takes_as_long_as_the_ring_that_runs(hosts: int, per_host: int) -> None:
    """The ring over threads with a counted clock; all connections alike, and adding free."""
    link = Speed(1e-4, 1e8, math.inf)
    for numel in (40, 40_000):  # a chunk is one message
        run = simulate(
            hosts * per_host,
            lambda exchange, numel=numel: ring.run(
                exchange, torch.ones(numel), exchange.combine(torch.add)
            ),
            link,
        )
        found = flat_ring(hosts, per_host, 4 * numel, link, link)
        assert run.seconds == pytest.approx(found, rel=1e-6 + hosts * per_host / numel)


def test_more_servers_are_faster_and_a_huge_tensor_limits_them() -> None:
    """VGG's largest tensor is on one server, however many there are, unless it is split."""
    profile = profile_from_speed(layers_of("vgg16"), 64, 130.9)
    link = Speed(1e-4, 1.3e9, math.inf)
    cluster = Cluster(16, 4, link, Speed(6e-6, 9e9, math.inf))

    def seconds(count: int, *, split: bool = False) -> float:
        return step(profile, cluster, Policy(servers=Servers(count, split=split))).seconds

    largest = 64 * 2 * 4 * max(each.parameters for each in layers_of("vgg16")) / 1.3e9
    assert seconds(1) > seconds(4) >= seconds(16) > largest > seconds(16, split=True)


@pytest.mark.parametrize(
    ("model", "parameters", "flop"),
    [
        ("resnet50", 25_557_032, 8.18e9),
        ("resnet101", 44_549_160, 15.6e9),
        ("resnet152", 60_192_808, 23.0e9),
        ("vgg16", 138_357_544, 30.9e9),
        ("inception_v3", 23_834_568, 11.4e9),
    ],
)
def test_models_have_their_published_sizes(model: str, parameters: int, flop: float) -> None:
    layers = layers_of(model)
    assert sum(each.parameters for each in layers) == parameters
    assert sum(each.flop for each in layers) == pytest.approx(flop, rel=0.01)
    assert set(MODELS) == {"resnet50", "resnet101", "resnet152", "vgg16", "inception_v3"}
