"""Any faults at any time: the roster keeps its invariants, and the run ends.

The simulated job is in `support.elastic_simulation`.
"""

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.launch.roster import Policy
from support.elastic_simulation import Fault, HostList, Simulation

SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
OFTEN = settings(max_examples=10_000 if SOAK else 200)
KINDS = ("kill", "kill", "error", "stuck", "leave", "lose host", "signal host", "signal")


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    num = draw(st.integers(1, 4))
    most = draw(st.none() | st.integers(num, 6))
    blacklist = draw(st.booleans())
    return Policy(
        num,
        draw(st.integers(1, num)),
        most,
        max_failures=draw(st.integers(1, 3)),
        elastic_timeout=draw(st.sampled_from([5.0, 40.0, 600.0])),
        reset_limit=draw(st.none() | st.integers(0, 4)),
        blacklist=blacklist,
        cooldown_range=draw(st.none() | st.just((1.0, 4.0))) if blacklist else None,
        notify_after=draw(st.sampled_from([None, 2.0])),
        first_step=draw(st.sampled_from([1.0, 30.0])),
    )


def host_lists() -> st.SearchStrategy[HostList]:
    labels = st.permutations(["a", "b", "c"])
    counts = st.lists(st.integers(1, 3), max_size=3)
    return st.tuples(labels, counts).map(lambda drawn: tuple(zip(drawn[0], drawn[1], strict=False)))


def faults() -> st.SearchStrategy[list[Fault]]:
    delays = st.sampled_from([0.0, 0.01, 0.3, 1.0, 4.0, 12.0])
    strikes = st.builds(Fault, delays, st.sampled_from(KINDS), st.integers(0, 5))
    lists = st.builds(Fault, delays, st.just("hosts"), hosts=host_lists())
    return st.lists(strikes | lists, max_size=12)


@OFTEN
@given(policies(), host_lists(), faults(), st.integers(0, 2**32), st.integers(1, 60))
def test_the_invariants_hold_and_the_run_ends(
    policy: Policy, hosts: HostList, what: list[Fault], seed: int, updates: int
) -> None:
    Simulation(policy, hosts, what, seed, updates).run()
