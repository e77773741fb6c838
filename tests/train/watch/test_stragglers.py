"""Stragglers: which worker or host is slow, in which part, since when and at which cost."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allstep.train.config.sync_config import SyncConfig
from allstep.train.watch.callback import Callback, Callbacks
from allstep.train.watch.straggler_advice import advice
from allstep.train.watch.straggler_report import described, with_straggler_report
from allstep.train.watch.straggler_watch import (
    Change,
    Interval,
    Straggler,
    StragglerWatch,
    slow_ranks,
)
from allstep.train.watch.sync_gains import Gains
from support.callback_events import CONFIG, opening, progress

ONE_HOST = ("a", "a", "a", "a")
TWO_HOSTS = ("a", "a", "b", "b")
USUAL = {"input": 0.1, "compute": 1.0, "update": 0.2}
COUNT = 640.0


def interval(
    number: int, slow: Mapping[int, Mapping[str, float]] = {}, *, exchange: float = 0.2, n: int = 4
) -> Interval:
    """Steps of `n` workers; `slow` has other seconds of some phases by rank.

    All wait for the slowest one, and then for the exchange.
    """
    by_rank = [{**USUAL, **slow.get(rank, {})} for rank in range(n)]
    own = [sum(each.values()) for each in by_rank]
    seconds = max(own) + exchange
    times = {phase: [each[phase] for each in by_rank] for phase in USUAL}
    times["wait"] = [seconds - each for each in own]
    return Interval(round((number + 1) * COUNT), COUNT, seconds, times)


def watched(
    intervals: Sequence[Interval], hosts: Sequence[str] = ONE_HOST, min_intervals: int = 5
) -> list[Change]:
    watch = StragglerWatch(hosts, min_intervals, min_seconds=0.0)
    return [change for each in intervals for change in watch.add(each)] + watch.close()


@pytest.mark.parametrize(
    ("slow", "hosts", "ranks", "name", "part", "factor"),
    [
        ({1: {"compute": 2.3}}, ONE_HOST, (1,), "worker 1", "compute", 2.0),
        ({3: {"input": 0.75}}, ONE_HOST, (3,), "worker 3", "input", 1.5),
        ({0: {"update": 1.5}}, ONE_HOST, (0,), "worker 0", "update", 2.0),
        ({3: {"compute": 2.3}}, TWO_HOSTS, (3,), "worker 3 on b", "compute", 2.0),
        (
            {2: {"compute": 2.3}, 3: {"compute": 2.3}},
            TWO_HOSTS,
            (2, 3),
            "host b (workers 2, 3)",
            "compute",
            2.0,
        ),
        ({2: {"input": 1.4}}, ("a", "b", "c", "d"), (2,), "host c (worker 2)", "input", 2.0),
    ],
)
def test_who_is_slow_and_in_which_part(
    slow: Any, hosts: Any, ranks: Any, name: str, part: str, factor: float
) -> None:
    """The others wait for it, longest those with the least work: waiting names no one."""
    found, ended = watched([interval(number, slow) for number in range(8)], hosts)
    assert (found.has_ended, ended.has_ended) == (False, True)
    straggler = found.straggler
    assert (straggler.ranks, straggler.name, straggler.part) == (ranks, name, part)
    assert straggler.factor == pytest.approx(factor)
    assert (straggler.since, straggler.until) == (0, 5 * COUNT)
    assert (ended.straggler.since, ended.straggler.until) == (0, 8 * COUNT)
    # With a usual worker instead, a step takes 1.3 s of work and 0.2 s of exchange.
    assert straggler.speed + straggler.cost == pytest.approx(COUNT / 1.5)
    assert straggler.mine * COUNT == pytest.approx(max(slow[ranks[0]].values()))
    assert straggler.usual * COUNT == pytest.approx(USUAL[part])


def test_a_slow_network_is_between_hosts() -> None:
    slow = [interval(number, exchange=3.9) for number in range(6)]
    assert watched(slow, ONE_HOST) == []
    straggler = watched(slow, TWO_HOSTS)[0].straggler
    assert (straggler.name, straggler.part) == ("the network between the hosts", "network")
    assert straggler.factor == pytest.approx(4.0)
    assert straggler.speed + straggler.cost == pytest.approx(COUNT / 1.3)


@pytest.mark.parametrize(
    "slow",
    [
        {},
        {1: {"compute": 1.3}},  # 1.23 times the work of the others
        {0: {"compute": 2.3}, 1: {"compute": 2.3}, 2: {"compute": 2.3}},  # one is fast
        {rank: {"compute": 5.0} for rank in range(4)},
    ],
)
def test_who_is_not_slow(slow: Any) -> None:
    assert slow_ranks(interval(0, slow), ONE_HOST) is None


def test_workers_that_take_turns_are_none() -> None:
    turns = [interval(number, {number % 4: {"compute": 3.0}}) for number in range(40)]
    assert watched(turns) == []


def test_it_must_last_and_may_pause() -> None:
    slow, usual = {1: {"compute": 3.0}}, {}
    pattern = [usual] * 3 + [slow] * 4 + [usual] * 3 + [slow] * 3 + [usual] * 2 + [slow] * 2
    pattern += [usual] * 4
    found = watched([interval(number, each) for number, each in enumerate(pattern)])
    assert [change.has_ended for change in found] == [False, True]
    assert {change.straggler.since for change in found} == {10 * COUNT}
    assert {change.straggler.until for change in found} == {17 * COUNT}
    watch = StragglerWatch(ONE_HOST, 2, min_seconds=30.0)
    seen = [watch.add(interval(number, slow)) for number in range(12)]
    # An interval takes 3.5 s.
    assert [len(each) for each in seen] == [0] * 8 + [1] + [0] * 3


def test_another_worker_ends_the_first() -> None:
    pattern = [{1: {"compute": 3.0}}] * 6 + [{2: {"input": 3.0}}] * 9
    found = watched([interval(number, each) for number, each in enumerate(pattern)])
    assert [(each.straggler.ranks, each.has_ended) for each in found] == [
        *(((1,), False), ((1,), True)),
        *(((2,), False), ((2,), True)),
    ]


@settings(deadline=None, max_examples=50)
# Less than a clock resolves: of the step, and of a worker in it.
@example(times=[[1.2e-38, *[0.0] * 7]], hosts=("a", "a"))
@example(times=[[5e-10, *[0.0] * 3, 8e-10, *[0.0] * 3]], hosts=("a", "a"))
@given(
    times=st.lists(st.lists(st.floats(0, 1e6), min_size=8, max_size=8), min_size=1, max_size=12),
    hosts=st.sampled_from([("a", "a"), ("a", "b")]),
)
def test_any_times_give_finite_figures(times: list[list[float]], hosts: Sequence[str]) -> None:
    phases = ("input", "compute", "wait", "update")
    intervals = []
    for number, each in enumerate(times):
        by_phase = {phase: each[2 * i : 2 * i + 2] for i, phase in enumerate(phases)}
        intervals.append(Interval(number * 64, 64.0, sum(each[::2]), by_phase))
    for change in watched(intervals, hosts, min_intervals=1):
        found = change.straggler
        assert 0 <= found.cost < float("inf") and found.factor >= 1 and found.since <= found.until
        assert "\n" not in described(change, 64)


# The line


class Heard(Callback):
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def event(self, text: str, **figures: Any) -> None:
        self.lines.append((text, figures))


def sent(callbacks: Callbacks, number: int, compute: Sequence[float]) -> None:
    seconds = max(compute) + 0.4
    times = {
        "input": [0.1] * len(compute),
        "compute": list(compute),
        "update": [0.1] * len(compute),
        "wait": [seconds - each - 0.2 for each in compute],
    }
    callbacks.progress(
        progress(
            (number + 1) * 640, times=times, seconds=seconds, images_per_second=640.0 / seconds
        )
    )


def test_the_line_of_a_running_run() -> None:
    heard = Heard()
    callbacks = with_straggler_report([heard])
    callbacks.start(opening())
    for number in range(15):
        sent(callbacks, number, [1.0, 2.6])
    for number in range(15, 19):
        sent(callbacks, number, [1.0, 1.0])
    (text, figures), (ended, last) = heard.lines
    assert text == (
        "worker 1 is 2.3 times slower than the others since sample 0 (30 s): its compute takes 260"
        " ms a step, that of the others 100 ms; without it the run would do 457 instead of 213"
        " images/s; look for other processes and a low clock rate on the machine (`allstep"
        " doctor`); if it stays slow, asynchronous training (sync=async) gains up to 1.7x; uneven"
        " shares (shares=speed) gain the same without staleness"
    )
    assert figures["samples"] == 10 * 640
    assert figures["straggler"]["ranks"] == (1,) and figures["straggler"]["part"] == "compute"
    assert figures["straggler"]["cost"] == pytest.approx(640 / 1.4 - 640 / 3.0)
    assert ended == ("worker 1 is no longer slow since sample 9,600; it cost 244 images/s for 45 s")
    assert last["straggler"]["has_ended"]


def test_other_workers_are_watched_from_the_start() -> None:
    """An elastic run continues with three; its change names their hosts."""
    heard = Heard()
    callbacks = with_straggler_report([heard])
    config = CONFIG.model_copy(update={"shares": "speed"})
    callbacks.start(opening(config=config, hosts=("a", "b")))
    for number in range(9):
        sent(callbacks, number, [1.0, 2.6])
    callbacks.event("1 worker joined", hosts=["a", "b", "b"], gap=0.1)
    for number in range(9, 20):
        sent(callbacks, number, [1.0, 2.6, 1.0])
    (_, (text, _)) = heard.lines
    assert text.startswith(
        "worker 1 on b is 2.3 times slower than the others since sample 5,760 (30 s)"
    )
    assert text.endswith(
        "look for other processes and a low clock rate on its host (`allstep doctor`)"
    )


def test_a_change_of_the_workers_ends_what_was_found() -> None:
    """A spare on another host replaces the slow worker, and is slow as well."""
    heard = Heard()
    callbacks = with_straggler_report([heard])
    callbacks.start(opening(hosts=("a", "b")))
    for number in range(11):
        sent(callbacks, number, [1.0, 2.6])
    callbacks.event("lost rank 1", hosts=["a", "c"], gap=0.1)
    for number in range(11, 21):
        sent(callbacks, number, [1.0, 2.6])
    found, _, (ended, figures), again = heard.lines
    assert found[0].startswith("host b (worker 1) is 2.3 times slower")
    assert ended == (
        "host b (worker 1) was slow until the workers changed after sample 7,040; it cost 244"
        " images/s for 33 s"
    )
    assert figures["samples"] == 7040 and figures["straggler"]["has_ended"]
    assert again[0].startswith(
        "host c (worker 1) is 2.3 times slower than the others since sample 7,040 (30 s)"
    )


FOUND = Straggler((0,), "", False, "update", 2.0, 0.1, 0.05, 0, 640, 30.0, 100.0, 50.0)


@pytest.mark.parametrize(
    ("changed", "end"),
    [
        ({}, "worker 0 also logs and saves: set a larger log_every or save.seconds"),
        ({"ranks": (1,)}, "clock rate on the machine (`allstep doctor`)"),
        ({"part": "input", "host": "b"}, "check the disk of its host, set more data.workers, or"),
        (
            {"part": "compute", "host": "b", "gains": Gains(1.8, 1.8)},
            "on its host (`allstep doctor`); if it stays slow, asynchronous training (sync=async)"
            " gains up to 1.8x; uneven shares (shares=speed) gain the same without staleness",
        ),
        ({"part": "compute", "gains": Gains(1.05, 1.05)}, "on the machine (`allstep doctor`)"),
        ({"part": "network", "ranks": ()}, "compare the hosts with `allstep doctor -H`"),
    ],
)
def test_what_to_do(changed: dict[str, Any], end: str) -> None:
    text = described(Change(replace(FOUND, **changed)), 64)
    assert end in text.rpartition("images/s; ")[2]


@pytest.mark.parametrize(
    ("sync", "is_even", "expected"),
    [
        ("local", True, "if it stays slow, asynchronous training (sync=async) gains up to 2x"),
        ("allreduce", False, "clock rate on the machine (`allstep doctor`)"),
        ("async", True, "asynchronous steps gain up to 2x over waiting for it; uneven shares"),
        ("elastic", True, "uneven shares (sync=allreduce shares=speed) gain 1.5x without"),
        ("clock", True, "a bound on ages (sync=stale:2) gains up to 2x, and uneven shares"),
    ],
)
def test_other_modes_that_fit_the_mode_of_the_run(sync: str, is_even: bool, expected: str) -> None:
    found = replace(FOUND, ranks=(1,), part="compute", gains=Gains(2.0, 1.5))
    text = advice(found, sync, is_even=is_even)
    assert expected in text
    assert ("or set shares=speed" not in text) and (is_even or "gain" not in text)


def test_a_slow_worker_of_an_asynchronous_run() -> None:
    """All workers are busy all the time; the slow one claims a third of the samples."""
    heard = Heard()
    callbacks = with_straggler_report([heard])
    config = CONFIG.model_copy(update={"sync": SyncConfig(name="async")})
    callbacks.start(opening(config=config))
    busy = {"input": [0.0, 0.0], "compute": [3.6] * 2, "update": [0.4] * 2, "wait": [0.0, 0.0]}
    for number in range(10):
        # Every second line without a step of worker 1.
        counts = [480, 0] if number % 2 == 0 else [480, 320]
        callbacks.progress(
            progress(
                (number + 1) * 640, times=busy, seconds=4.0, images_per_second=160.0, counts=counts
            )
        )
    assert heard.lines == [], "an interval has a step of every worker"
    for number in range(10, 20):
        counts = [480, 0] if number % 2 == 0 else [480, 320]
        callbacks.progress(
            progress(
                (number + 1) * 640, times=busy, seconds=4.0, images_per_second=160.0, counts=counts
            )
        )
    ((text, figures),) = heard.lines
    # With even shares 640 samples each take 5.33 s and 16 s.
    assert text == (
        "worker 1 is 3.0 times slower than the others since sample 0 (80 s): its compute takes 720"
        " ms a step, that of the others 240 ms; without it the run would do 240 instead of 160"
        " images/s; look for other processes and a low clock rate on the machine (`allstep"
        " doctor`); asynchronous steps gain up to 2x over waiting for it; uneven shares"
        " (sync=allreduce shares=speed) gain the same without staleness"
    )
    assert figures["straggler"]["gains"]["asynchronous"] == pytest.approx(2.0)


def test_without_callbacks_there_is_no_report() -> None:
    assert with_straggler_report([]).callbacks == []
