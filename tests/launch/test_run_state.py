"""Which rank failed first, when to stop, the exit code: any events, without process or clock."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allstep.launch.cause import first
from allstep.launch.restart import Situation, Stop, fixed
from allstep.launch.run_events import (
    Decision,
    Event,
    Exited,
    Greeted,
    KillAll,
    LeaveHost,
    LinkEnded,
    Refused,
    SendSignal,
    Signaled,
    StoreEnded,
    TracebackStarted,
    WorkerStarted,
)
from allstep.launch.run_state import RESUBMIT, HostRanks, RunState

LOST = 10.0
OWN = ("Traceback (most recent call last):", "  x", "ValueError: no")
BLAMES = ("Traceback (most recent call last):", "  x", "RuntimeError: Connection closed by peer")
ERRORS = st.sampled_from([(), OWN, BLAMES, ("a line",), ("allstep: no such net",)])
CODES = st.sampled_from([0, 0, 1, 2, 3, RESUBMIT, -9, -15])
NUMBERS = st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])

Batch = tuple[float, list[Event]]
"""Events of one moment."""


@dataclass(frozen=True)
class Run:
    """A run, and what happens in it: simultaneous events are in one batch."""

    hosts: tuple[HostRanks, ...]
    grace: float
    batches: tuple[Batch, ...]


@st.composite
def runs(draw: st.DrawFn, with_signals: bool = True) -> Run:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    hosts = tuple(
        HostRanks(f"h{number}", range(start, start + size), draw(st.booleans()))
        for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )
    ranks, numbers = st.integers(0, sum(sizes) - 1), st.integers(0, len(sizes) - 1)
    kinds = [
        st.builds(Exited, st.just(0.0), ranks, CODES, ERRORS, st.booleans()),
        st.builds(Exited, st.just(0.0), ranks, CODES, ERRORS),
        st.builds(TracebackStarted, st.just(0.0), ranks),
        st.builds(WorkerStarted, st.just(0.0), numbers),
        st.builds(LinkEnded, st.just(0.0), numbers, st.just("its agent was killed")),
    ]
    if with_signals:
        kinds += [
            st.builds(Signaled, st.just(0.0), NUMBERS),
            st.builds(
                Refused, st.just(0.0), numbers, st.sampled_from(["command not found", "no folder"])
            ),
            st.builds(StoreEnded, st.just(0.0), st.just("its thread is gone")),
        ]
    now, batches = 0.0, []
    ended: set[int] = set()
    for events in draw(st.lists(st.lists(st.one_of(kinds), max_size=5), max_size=6)):
        now += draw(st.sampled_from([0.125, 0.5, 1.0, 1.75]))
        # A rank exits once, and no more than that is expected of an agent.
        exits = {event.rank for event in events if isinstance(event, Exited)} - ended
        once = [event for event in events if not isinstance(event, Exited)]
        once += [
            next(e for e in events if isinstance(e, Exited) and e.rank == rank) for rank in exits
        ]
        ended |= exits
        batches.append((now, [replace(event, at=now) for event in once]))
    return Run(hosts, draw(st.sampled_from([0.0, 1.0, 30.0])), tuple(batches))


def started(run: Run) -> RunState:
    state = RunState(run.hosts, run.grace, LOST)
    for number in range(len(run.hosts)):
        state.take(Greeted(0.0, number))
    state.decide(0.0)
    state.start()
    return state


def play(run: Run) -> tuple[RunState, list[tuple[float, Decision]]]:
    """Play all that happens; then nothing more, but signs of life, until the state ends the run."""
    state, decided = started(run), []
    for now, events in [*run.batches, *ticks(run)]:
        if state.is_over:
            break
        for host in range(len(run.hosts)):
            state.note_alive(host, now)
        for event in events:
            state.take(event)
        decided += [(now, decision) for decision in state.decide(now)]
    return state, decided


def ticks(run: Run) -> Iterator[Batch]:
    """A second each, for longer than all time limits together."""
    last = run.batches[-1][0] if run.batches else 0.0
    for second in range(1, 80):
        yield last + second, []


def outcome(state: RunState) -> tuple:
    return (
        state.exits,
        state.failures,
        state.problem,
        state.conclusion(99.0, lambda rank: True, foreground=False),
    )


@given(runs(), st.randoms(use_true_random=False))
def test_the_order_of_simultaneous_events_does_not_matter(run: Run, random) -> None:
    state, decided = play(run)
    shuffled = replace(
        run, batches=tuple((now, random.sample(events, len(events))) for now, events in run.batches)
    )
    again, decided_again = play(shuffled)
    assert decided_again == decided
    assert outcome(again) == outcome(state)


SILENT_THEN_EXPLAINED = Run(
    (HostRanks("h0", range(2), False),),
    0.0,
    ((0.125, [Exited(0.125, 0, 1, ()), Exited(0.125, 1, 1, ("allstep: no such net",))]),),
)


@example(SILENT_THEN_EXPLAINED)
@given(runs())
def test_a_failure_has_one_cause_and_the_run_ends_with_its_code(run: Run) -> None:
    state, _ = play(run)
    if state.problem:
        assert state.exit_code == 2
        return
    if state.store_failure:
        assert state.exit_code == 1
        return
    if not state.failures:
        assert state.exit_code in (0, RESUBMIT, *(128 + number for number in state.signals))
        return
    cause = first(state.failures)
    others = [failed for failed in state.failures if failed is not cause]
    assert state.exit_code == cause.exit_code != 0
    assert state.exits[cause.rank] == cause.code
    assert not any(
        (other.is_consequence, other.moment) < (cause.is_consequence, cause.moment)
        for other in others
    )
    text = state.conclusion(99.0, lambda rank: True, foreground=False).text
    assert text.count("allstep run: ") == 1
    heads = [line for line in text.splitlines() if line.startswith("allstep run: ")]
    assert len(heads) == 1
    if cause.lost:
        assert f"host {cause.host} is lost" in heads[0]
        return
    # Where a command of allstep fails on all ranks, one of them prints the reason: it is named.
    explained = [
        each for each in state.failures if each.explains_itself and each.code == cause.code
    ]
    is_explained = not cause.has_traceback and explained and cause not in explained
    named = explained if is_explained else [cause]
    assert any(f"rank {each.rank} on {each.host} failed" in heads[0] for each in named)


@given(runs(with_signals=False))
def test_the_first_own_failure_is_the_cause(run: Run) -> None:
    """An oracle of its own: exits in the order of time, until the others are stopped."""
    state, decided = play(run)
    stopped_at = next((now for now, each in decided if isinstance(each, SendSignal)), float("inf"))
    gone = {
        event.host
        for now, events in run.batches
        for event in events
        if isinstance(event, LinkEnded)
    }
    own = [
        (now, event.rank)
        for now, events in run.batches
        for event in events
        if isinstance(event, Exited)
        and now <= stopped_at
        and event.errors != BLAMES
        and event.code not in (0, RESUBMIT)
    ]
    complaints = any(
        isinstance(event, TracebackStarted) for _, events in run.batches for event in events
    )
    if own and not gone and not complaints:
        assert state.exits[min(own)[1]] != 0
        assert first(state.failures).rank == min(own)[1]


@given(runs())
def test_what_is_decided_is_decided_once(run: Run) -> None:
    state, decided = play(run)
    left = [each.host for _, each in decided if isinstance(each, LeaveHost)]
    assert len(left) == len(set(left)) and set(left) == state.over
    forwarded = [
        each.number for _, each in decided if isinstance(each, SendSignal) and each.host is None
    ]
    for number in (signal.SIGINT, signal.SIGUSR1):
        assert forwarded.count(number) == state.signals.count(number) <= 1
    assert forwarded.count(signal.SIGTERM) <= 2, "one that was forwarded, one to stop the others"
    first_signal = next(
        (index for index, (_, each) in enumerate(decided) if isinstance(each, SendSignal)), None
    )
    kills = [index for index, (_, each) in enumerate(decided) if isinstance(each, KillAll)]
    if kills and RESUBMIT not in state.exits.values():
        assert first_signal is not None and first_signal < kills[0]


@given(runs())
def test_a_run_that_must_end_ends(run: Run) -> None:
    state, _ = play(run)
    assert state.is_over == bool(
        state.failures
        or state.signals
        or state.problem
        or state.store_failure
        or RESUBMIT in state.exits.values()
        or len(state.exits) == state.size
        or len(state.over) == len(run.hosts)
    )


TWO = (HostRanks("here", range(2)), HostRanks("far", range(2, 4), remote=True))


def two_hosts(grace: float = 30.0, **more) -> RunState:
    state = RunState(TWO, grace, LOST, **more)
    for number in range(2):
        state.take(Greeted(0.0, number))
    assert state.decide(0.0) == []
    state.start()
    return state


def decide(state: RunState, now: float, *events: Event) -> list[Decision]:
    """With a sign of life of both hosts."""
    for host in range(2):
        state.note_alive(host, now)
    for event in events:
        state.take(event)
    return state.decide(now)


def test_a_consequence_waits_for_its_cause() -> None:
    state = two_hosts()
    assert decide(state, 1.0, Exited(1.0, 0, 1, BLAMES)) == []
    assert decide(state, 2.5) == []
    assert decide(state, 2.75, Exited(2.75, 3, 7, OWN)) == [SendSignal(signal.SIGTERM)]
    assert (state.exit_code, first(state.failures).rank, state.num_stopped) == (7, 3, 2)
    assert decide(state, 5.5) == []
    assert decide(state, 6.0) == [KillAll()]
    for rank in (1, 2):
        assert decide(state, 6.0, Exited(6.0, rank, -9)) == []
    assert state.is_over and len(state.failures) == 2


def test_without_a_cause_the_first_consequence_is_reported() -> None:
    state = two_hosts()
    decide(state, 1.0, Exited(1.0, 2, 1, BLAMES))
    assert decide(state, 3.0, Exited(3.0, 0, 1, BLAMES)) == [SendSignal(signal.SIGTERM)]
    assert first(state.failures).rank == 2


def test_the_policy_is_asked_once_with_the_cause() -> None:
    asked: list[Situation] = []

    def policy(situation: Situation) -> Stop:
        asked.append(situation)
        return fixed(situation)

    state = two_hosts(policy=policy)
    decide(state, 1.0, Exited(1.0, 1, 3))
    decide(state, 1.125, Exited(1.125, 2, 1, BLAMES))
    decide(state, 1.25)
    decide(state, 1.5)
    decide(state, 4.75)
    ((cause, failed, running),) = asked
    assert (cause.rank, cause.code, failed, running) == (1, 3, {1, 2}, {0, 3})


def test_a_traceback_counts_from_its_beginning() -> None:
    state = two_hosts()
    decide(state, 1.0, TracebackStarted(1.0, 3))
    decide(state, 2.0, Exited(2.0, 0, 1, OWN))
    decide(state, 2.125, Exited(2.125, 3, 2, OWN))
    assert (first(state.failures).rank, first(state.failures).moment) == (3, 1.0)


def test_signals() -> None:
    state = two_hosts()
    assert decide(state, 1.0, Signaled(1.0, signal.SIGTERM), Signaled(1.0, signal.SIGTERM)) == [
        SendSignal(signal.SIGTERM)
    ]
    assert decide(state, 20.0, Exited(20.0, 0, 3)) == [], "not a failure"
    assert decide(state, 31.5) == [KillAll()]
    assert decide(state, 41.0) == []
    assert decide(state, 42.0) == [LeaveHost(0, lost=True), LeaveHost(1, lost=True)]
    assert state.is_over and state.exit_code == 128 + signal.SIGTERM


@pytest.mark.parametrize("blocked", [False, True])
def test_a_second_ctrl_c_kills(blocked: bool) -> None:
    state = two_hosts()
    act = state.decide_while_blocked if blocked else state.decide
    state.take(Exited(0.5, 0, 0))
    state.take(Signaled(1.0, signal.SIGINT))
    assert act(1.0) == [SendSignal(signal.SIGINT)]
    state.take(Signaled(2.0, signal.SIGINT))
    assert act(2.0) == [KillAll()]
    assert not state.must_end(12.0) and state.must_end(12.5)
    assert (0 in state.exits) != blocked, "what links report waits for the next turn"


def test_ctrl_c_kills_after_three_seconds() -> None:
    state = two_hosts()
    decide(state, 1.0, Signaled(1.0, signal.SIGINT))
    assert decide(state, 3.9) == [] and decide(state, 4.1) == [KillAll()]


def test_a_silent_host_is_lost_and_a_pause_of_the_launcher_is_not() -> None:
    state = two_hosts()
    for second in range(1, 11):
        assert state.decide(float(second)) == []
    assert state.decide(30.0) == [], "the launcher did not run"
    for second in (31.0, 32.0):
        state.decide(second)
    assert state.failures[0].lost.startswith("no sign of life for ") and state.over == {1}
    quiet = two_hosts()
    for second in range(1, 11):
        if second == 4:
            quiet.take(Exited(4.0, 0, 1, BLAMES))
        assert quiet.decide(float(second)) == [], "the silent host may be the cause"
    assert quiet.decide(10.5)[0] == LeaveHost(1, lost=True)
    assert first(quiet.failures).lost


def test_a_link_that_ends() -> None:
    early = RunState(TWO, 30.0, LOST)
    early.take(Greeted(0.5, 0))
    early.take(LinkEnded(1.0, 1, "ssh to far failed"))
    assert early.decide(1.0) == [LeaveHost(1, lost=False)]
    assert (early.problem, early.is_over, early.exit_code) == ("ssh to far failed", True, 2)
    late = two_hosts()
    ended = [Exited(1.0, 2, 0), Exited(1.0, 3, 0)]
    assert decide(late, 1.0, LinkEnded(1.0, 1, "gone"), *ended) == [LeaveHost(1, lost=False)]
    assert not late.failures and not late.is_over
    assert decide(late, 2.0, LinkEnded(2.0, 0, "gone")) == [LeaveHost(0, lost=True)]
    assert first(late.failures).how == "gone (ranks 0-1)" and late.is_over and late.exit_code == 1


def test_workers_that_start_while_the_run_stops_are_stopped() -> None:
    state = two_hosts()
    assert decide(state, 1.0, WorkerStarted(1.0, 1)) == []
    decide(state, 1.0, StoreEnded(1.0, "broken"))
    assert decide(state, 1.5, WorkerStarted(1.5, 1))[0] == SendSignal(signal.SIGTERM, 1)
    end = state.conclusion(1.5, lambda rank: True, foreground=False)
    assert (end.code, "4 of 4 workers were killed" in end.text) == (1, True)


def test_saved_and_to_be_started_again() -> None:
    state = two_hosts(grace=2.0)
    assert decide(state, 1.0, Exited(1.0, 0, RESUBMIT)) == []
    assert decide(state, 3.5) == [KillAll()]
    for rank in (1, 2, 3):
        decide(state, 4.0, Exited(4.0, rank, -9 if rank == 1 else RESUBMIT))
    assert state.failures and state.exit_code == 137
    saved = two_hosts()
    decide(saved, 1.0, *(Exited(1.0, rank, RESUBMIT) for rank in range(4)))
    assert saved.is_over and saved.exit_code == RESUBMIT
    assert saved.conclusion(1.0, lambda rank: True, foreground=False).text == ""


def test_nothing_starts_after_a_signal() -> None:
    state = RunState(TWO, 30.0, LOST)
    state.take(Greeted(0.5, 0))
    state.take(Signaled(0.5, signal.SIGINT))
    state.decide(0.5)
    assert not state.may_start and state.is_over and state.exit_code == 130
