"""Any faults at any time: the roster keeps its invariants, and the run ends.

The simulated job and its checks are in `support.elastic_simulation`.
"""

import os
import typing

from hypothesis import example, given, settings
from hypothesis import strategies as st

from allstep.launch.roster import Policy
from allstep.launch.roster.actions import Action, EndGeneration, Publish, ReportLoss
from support.elastic_simulation import Fault, HostList, Simulation

SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
OFTEN = settings(max_examples=10_000 if SOAK else 200)
LESS_OFTEN = settings(max_examples=2_000 if SOAK else 40)
KINDS = ("kill", "kill", "error", "stuck", "leave", "lose host", "signal host", "signal")
LABELS = ("a", "b", "c")


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    num = draw(st.integers(1, 4))
    if draw(st.integers(0, 3)) == 0:
        return Policy.continuing(num)
    blacklist = draw(st.booleans())
    return Policy(
        num,
        draw(st.integers(1, num)),
        draw(st.none() | st.integers(num, 6)),
        max_failures=draw(st.sampled_from([3, 2, 1])),
        elastic_timeout=draw(st.sampled_from([600.0, 40.0, 5.0])),
        reset_limit=draw(st.sampled_from([None, None, None, 0, 1, 3])),
        blacklist=blacklist,
        cooldown_range=draw(st.sampled_from([None, (1.0, 4.0)])) if blacklist else None,
        notify_after=draw(st.sampled_from([None, 2.0])),
        first_step=draw(st.sampled_from([30.0, 1.0])),
    )


def host_lists(least: int) -> st.SearchStrategy[HostList]:
    counts = st.lists(st.integers(1, 3), min_size=least, max_size=3)
    return st.tuples(st.permutations(LABELS), counts).map(
        lambda drawn: tuple(zip(drawn[0], drawn[1], strict=False))
    )


def faults() -> st.SearchStrategy[list[Fault]]:
    delays = st.sampled_from([8.0, 20.0, 4.0, 1.0, 0.3, 0.01, 0.0])
    strikes = st.builds(Fault, delays, st.sampled_from(KINDS), st.integers(0, 8))
    lists = st.builds(Fault, delays, st.just("hosts"), hosts=host_lists(0))
    return st.lists(strikes | lists, max_size=12)


UPDATES = st.sampled_from([20, 1, 300])
SEEDS = st.integers(0, 2**32)


# No member waits when the run begins to stop, and the last one answers later than any step takes.
SLOW_LAST = Policy(2, 1, elastic_timeout=5.0, blacklist=True)


@OFTEN
@example(
    SLOW_LAST,
    (("a", 1), ("b", 1), ("c", 1)),
    [Fault(4.0, "kill", 1), Fault(8.0, "kill", 0)],
    1141804,
    20,
)
@given(policies(), host_lists(1), faults(), SEEDS, UPDATES)
def test_the_invariants_hold_and_the_run_ends(
    policy: Policy, hosts: HostList, what: list[Fault], seed: int, updates: int
) -> None:
    Simulation(policy, hosts, what, seed, updates).run()


@LESS_OFTEN
@given(st.lists(st.integers(0, 8), max_size=6), SEEDS)
def test_a_run_continues_without_any_number_of_lost_workers(victims: list[int], seed: int) -> None:
    """Workers that obey; one of 4 is killed every 20 s. The last one finishes the run."""
    what = [Fault(20.0, "kill", which) for which in victims]
    job = Simulation(Policy.continuing(4), (("a", 2), ("b", 2)), what, seed, 150, calm=True)
    end = job.run().conclusion
    kills = [each for each in job.checks.exits if each.code == -9]
    done = [each for each in job.checks.exits if each.code == 0]
    assert len(job.processes) == 4 and len(kills) + len(done) == 4
    assert (end.code == 0) == bool(done)
    losses = [what for _, what in job.log if isinstance(what, ReportLoss)]
    assert len(losses) == min(len(kills), 3)


@LESS_OFTEN
@given(st.lists(st.integers(0, 8), max_size=6), st.sampled_from([None, 4]), SEEDS)
def test_a_run_survives_any_number_of_single_losses(
    victims: list[int], most: int | None, seed: int
) -> None:
    """Workers that obey, on 4 slots; one is killed every 20 s. Nothing else may end the run."""
    what = [Fault(20.0, "kill", which) for which in victims]
    job = Simulation(Policy(3, 2, most), (("a", 2), ("b", 2)), what, seed, 150, calm=True)
    assert job.run().conclusion.code == 0
    assert all(each.updates == 150 for each in job.members_at_the_end())
    ends = [now for now, what in job.log if isinstance(what, EndGeneration)]
    for ended in ends:
        following = [now for now, what in job.log if isinstance(what, Publish) and now >= ended]
        # The slowest answers after 1.5 s, which the launcher learns 0.5 s later.
        assert not following or following[0] - ended < 2.5


def test_the_simulation_reaches_everything() -> None:
    """A simulation in which little happens would check little."""
    seen: set[type] = set()
    texts: set[str] = set()
    generations = []
    for seed in range(60):
        what = [Fault(9.0, KINDS[(seed + n) % 7], seed * n) for n in range(6)]
        what.insert(3, Fault(1.0, "hosts", hosts=(("a", 2), ("c", 3 * (seed % 2)))))
        policy = Policy(3, 1 + seed % 3, elastic_timeout=40.0, blacklist=seed % 5 == 0)
        policy = Policy.continuing(4) if seed % 6 == 1 else policy
        job = Simulation(policy, (("a", 2), ("b", 2)), what, seed, 300)
        texts.add(job.run().conclusion.text)
        seen |= {type(each) for _, each in job.log}
        generations.append(job.plan.generation if job.plan else -1)
    assert set(typing.get_args(Action)) <= seen
    assert max(generations) >= 6 and sum(number >= 2 for number in generations) >= 20
    for part in ("no state left", "workers can continue", "failed first of"):
        assert any(part in text for text in texts), part
