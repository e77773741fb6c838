"""Any events in any order, also those that no worker would cause."""

import os
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.launch.roster import Policy, Roster
from allstep.launch.roster.actions import Action, FinishRun, Publish
from allstep.launch.roster.roster_events import (
    Event,
    HostLost,
    HostsFound,
    HostsSignaled,
    Progress,
    Ready,
    Standby,
    StartFailed,
    WorkerExited,
)

SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
OFTEN = settings(max_examples=10_000 if SOAK else 200)
Batch = tuple[float, list[Event]]

WORKERS, GENERATIONS, UPDATES = st.integers(0, 6), st.integers(0, 3), st.integers(0, 9)
HOSTS = st.sampled_from(["a", "b", "c"])
AT = st.just(0.0)
SINGLE = st.one_of(
    st.builds(Standby, AT, WORKERS),
    st.builds(Progress, AT, WORKERS, GENERATIONS, UPDATES),
    st.builds(Ready, AT, WORKERS, GENERATIONS, UPDATES | st.none()),
    st.builds(
        WorkerExited,
        AT,
        WORKERS,
        st.sampled_from([0, 1, 2, 75, -9, -15]),
        st.sampled_from([(), ("RuntimeError: Connection closed by peer",)]),
        signature=st.sampled_from(["", "S"]),
    ),
    st.builds(StartFailed, AT, WORKERS, st.just("no ssh")),
    st.builds(HostLost, AT, HOSTS, st.just("silent")),
    st.builds(HostsSignaled, AT, st.sampled_from([2, 10, 15]), st.none() | st.tuples(HOSTS)),
    st.builds(
        HostsFound,
        AT,
        st.lists(st.tuples(HOSTS, st.integers(0, 3)), max_size=3, unique_by=lambda x: x[0]).map(
            tuple
        ),
    ),
)
# Half of the runs get beyond their start.
OPENING: list[Event] = [
    HostsFound(0.0, (("a", 2), ("b", 1))),
    *(Standby(0.0, worker) for worker in range(3)),
]


@st.composite
def runs(draw: st.DrawFn) -> list[Batch]:
    now, batches = 0.5, [(0.0, OPENING[:1]), (0.5, OPENING[1:] if draw(st.booleans()) else [])]
    for events in draw(st.lists(st.lists(SINGLE, max_size=4), max_size=12)):
        now += draw(st.sampled_from([0.25, 1.0, 5.0, 40.0]))
        once = [each for each in events if not isinstance(each, HostsFound)]
        # Between two lists of one moment the last one counts.
        once += [each for each in events if isinstance(each, HostsFound)][:1]
        batches.append((now, [replace(each, at=now) for each in once]))
    return batches


POLICIES = st.builds(
    Policy,
    st.just(2),
    st.integers(1, 2),
    st.sampled_from([None, 3]),
    elastic_timeout=st.just(60.0),
    blacklist=st.booleans(),
    reset_limit=st.sampled_from([None, 1]),
) | st.just(Policy.continuing(2))


def play(policy: Policy, batches: list[Batch]) -> list[tuple[float, list[Action]]]:
    """Play all events; then only time passes, until the roster waits for an event."""
    roster, decided, now = Roster(policy), [], 0.0
    for now, events in batches:
        for event in events:
            roster.take(event)
        decided.append((now, roster.decide(now)))
        assert roster.deadline is None or roster.deadline > now
    for _ in range(100):
        if (deadline := roster.deadline) is None:
            return decided
        now = deadline
        decided.append((now, roster.decide(now)))
    raise AssertionError("the roster finds no rest")


@OFTEN
@given(POLICIES, runs())
def test_generations_count_up_and_the_end_is_the_end(policy: Policy, batches: list[Batch]) -> None:
    actions = [each for _, batch in play(policy, batches) for each in batch]
    plans = [each.plan for each in actions if isinstance(each, Publish)]
    assert [plan.generation for plan in plans] == list(range(len(plans)))
    left_out: set[int] = set()
    for before, plan in pairwise(plans):
        assert plan.source in before.members and plan.members[0] in before.members
        assert set(plan.new) == set(plan.members) - set(before.members)
        left_out |= set(before.members) - set(plan.members)
        assert not left_out & set(plan.members)
    reports = [each for _, events in batches for each in events if isinstance(each, Ready)]
    ready = {(each.worker, each.generation) for each in reports}
    for plan in plans:
        stay = set(plan.members) - set(plan.new)
        assert {(worker, plan.generation - 1) for worker in stay} <= ready
        assert policy.min_workers <= len(plan.members) <= (policy.max_workers or 99)
    ends = [index for index, each in enumerate(actions) if isinstance(each, FinishRun)]
    assert ends in ([], [len(actions) - 1])


@OFTEN
@given(POLICIES, runs(), st.randoms(use_true_random=False))
def test_the_order_of_simultaneous_events_does_not_matter(
    policy: Policy, batches: list[Batch], random
) -> None:
    shuffled = [(now, random.sample(events, len(events))) for now, events in batches]
    assert play(policy, shuffled) == play(policy, batches)
