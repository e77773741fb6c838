"""Parties and staleness in the report, from records that were made up."""

from pathlib import Path
from typing import Any

import pytest

from allstep.report import judge, write_report
from allstep.report.sync.party_figures import BOTTOM, TOP, parties
from allstep.report.sync.sync_advice import gained, gains
from allstep.runlog import RunRecord
from allstep.study.recorded.split import split
from allstep.train.watch.recorded_sync import recorded_sync
from support.html_checker import Checker
from support.synthetic_runs import BEGAN, lines, record, write

LATER = BEGAN + 1000.0
Party = tuple[int, float, dict[int, int]]


def point(samples: int, *parties: Party) -> dict[str, Any]:
    """A synchronization point at a position: samples, seconds waited and ages of each party."""
    figures = {
        str(rank): {
            "samples": count,
            "pushes": sum(ages.values()),
            "waited": waited,
            "ages": {str(age): pushes for age, pushes in ages.items()},
            "sent": 2 * count,
            "received": 4 * count,
        }
        for rank, (count, waited, ages) in enumerate(parties)
    }
    line = {"kind": "sync", "time": BEGAN + samples / 100, "samples": samples, "version": samples}
    return {**line, "parties": figures, "torn": 0}


UNEVEN = [
    point(4000, (3000, 0.5, {0: 20, 1: 10}), (1000, 0.0, {3: 10})),
    point(8000, (3000, 1.5, {0: 10, 1: 20}), (1000, 0.0, {2: 4, 3: 6})),
]


def asynchronous(points: list[dict[str, Any]] = UNEVEN) -> RunRecord:
    return record([*lines(), *points])


def judgement(rule: str, found: RunRecord) -> Any:
    return next((each for each in judge(found, LATER) if each.rule == rule), None)


def test_figures_of_all_points_together() -> None:
    found = recorded_sync(asynchronous())
    assert found is not None and found.num_points == 2
    first, second = found.parties[0], found.parties[1]
    assert (first.samples, first.pushes, first.waited) == (6000, 60, 2.0)
    assert first.ages == {0: 30, 1: 30} and second.ages == {2: 4, 3: 16}
    assert (first.mean_age, second.mean_age) == pytest.approx((0.5, 2.8))
    # Each sample counts once: 0.75 x 0.5 + 0.25 x 2.8, in updates; a round is two of them.
    assert found.effective_age == pytest.approx(1.075)
    assert found.effective_rounds == pytest.approx(0.5375)
    assert found.largest_age == 3 and sum(found.ages.values()) == 80
    assert gained(found) == pytest.approx(2.0)


def test_lines_that_a_resumed_run_wrote_again_count_once() -> None:
    found = recorded_sync(asynchronous([*UNEVEN, UNEVEN[1]]))
    assert found is not None and found.parties[0].samples == 6000


def test_table_and_histograms() -> None:
    found = parties(asynchronous())
    assert found is not None
    # The run has 80 lines of half a second.
    assert found.rows == (
        ("0", "6,000 (75%)", "60", "0.50", "1", "2 s (5.0%)", "12 kB", "24 kB"),
        ("1", "2,000 (25%)", "20", "2.80", "3", "0 s (0.0%)", "4 kB", "8 kB"),
    )
    fast, slow = found.histograms
    assert [bar.text for bar in fast.bars] == ["age 0: 50.0%", "age 1: 50.0%"]
    assert [bar.text for bar in slow.bars] == ["age 2: 20.0%", "age 3: 80.0%"]
    # The same axes: the highest bar of all parties fills the height.
    assert slow.bars[1].height == BOTTOM - TOP
    assert fast.bars[0].height == pytest.approx((BOTTOM - TOP) * 50 / 80)
    assert [text for _, text in found.ticks] == ["0", "1", "2", "3"]
    assert found.summary.startswith("Effective staleness: 1.07 updates, or 0.54 rounds.")


def test_many_ages_are_ranges() -> None:
    found = parties(asynchronous([point(10, (10, 0.0, dict.fromkeys(range(100), 1)))]))
    assert found is not None
    (only,) = found.histograms
    assert len(only.bars) == 20 and only.bars[0].text == "age 0 to 4: 5.0%"


def test_bytes_and_waiting_of_a_synchronous_run() -> None:
    """All gradients have age 0; a line without these figures, of an earlier version, is skipped."""
    times = {"input": [0.0] * 2, "compute": [0.1, 0.3], "wait": [0.2, 0.0], "update": [0.0] * 2}
    more = {"counts": [60, 40], "sent": [1000, 2000], "received": [3000, 3000]}

    def extra(line: int) -> dict[str, Any]:
        return {**times, **(more if line else {}), "version": line + 1}

    found = parties(record(lines(extra=extra)))
    assert found is not None and found.histograms == ()
    assert found.rows == (
        ("0", "4,740 (60%)", "80", "0.00", "0", "16 s (39.5%)", "79 kB", "237 kB"),
        ("1", "3,160 (40%)", "80", "0.00", "0", "0 s (0.0%)", "158 kB", "237 kB"),
    )
    assert "no gradient is older" in found.summary
    assert judgement("asynchronous", record(lines(extra=extra))) is None


def test_a_synchronous_run_has_no_parties() -> None:
    assert parties(record(lines())) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"parties": None},
        {"parties": {"x": {}, "0": 3}},
        {"parties": {"0": {"samples": "many", "pushes": None, "ages": [1]}}},
        {"parties": {"0": {"samples": float("nan"), "ages": {"-1": 1, "2": float("inf")}}}},
        {"parties": {"0": {"samples": 1, "ages": {"9" * 30: 1, "9999999": 3}}}},
    ],
)
def test_damaged_lines_are_no_error(damage: dict[str, Any], tmp_path: Path) -> None:
    damaged = {**UNEVEN[0], **damage}
    parties(asynchronous([damaged]))
    judge(asynchronous([damaged]), LATER)


def test_gains_of_a_synchronous_run() -> None:
    times = {"input": [0.0], "compute": [0.1, 0.3], "wait": [0.2, 0.0], "update": [0.0]}
    found = split(record(lines(times=times)))
    assert found is not None
    possible = gains(found)
    # A third of the time for the slow one: 4/3 shares instead of 2/3.
    assert possible is not None
    assert (possible.asynchronous, possible.uneven) == pytest.approx((2.0, 2.0))


def test_a_slow_worker_brings_figures_of_both_ways_out() -> None:
    times = {"input": [0.0], "compute": [0.1, 0.3], "wait": [0.2, 0.0], "update": [0.01]}
    slow = judgement("straggler", record(lines(times=times)))
    assert "worker 1 works 2.82 times as long" in slow.figures
    assert slow.advice.endswith(
        "If it stays slow: asynchronous training (`sync=async`) gains up to 1.9x; uneven shares"
        " (`shares=speed`) gain the same without staleness."
    )
    again = lines(times=times)
    again[0]["config"] = {**again[0].get("config", {}), "shares": "speed"}
    assert "asynchronous" not in judgement("straggler", record(again)).advice


def test_what_asynchronous_steps_gained() -> None:
    found = judgement("asynchronous", asynchronous())
    assert found.title == "Asynchronous steps gain speed"
    assert "worker 1 is always 3 times slower than worker 0" in found.figures
    assert "gain 2x over waiting for it; effective staleness 1.07 updates" in found.figures
    assert "gain the same without staleness" in found.advice
    assert judgement("straggler", asynchronous()) is None


def test_a_slowest_worker_that_changes_is_not_for_uneven_shares() -> None:
    turns = [
        point(1000, (900, 0.0, {0: 9}), (100, 0.0, {4: 1})),
        point(2000, (550, 0.0, {1: 5}), (450, 0.0, {1: 5})),
        point(3000, (400, 0.0, {1: 4}), (600, 0.0, {1: 6})),
        point(4000, (400, 0.0, {1: 4}), (600, 0.0, {1: 6})),
    ]
    found = judgement("asynchronous", asynchronous(turns))
    assert "was on average 1.3 times slower" in found.figures
    assert "which uneven shares cannot follow" in found.advice


def test_equal_parties() -> None:
    even = point(1000, (510, 0.0, {1: 5}), (490, 0.0, {1: 5}))
    found = judgement("asynchronous", asynchronous([even]))
    assert found.title == "The parties are equally fast"
    assert "effective staleness 1.00 updates (0.50 rounds)" in found.figures


def test_waiting_for_the_bound() -> None:
    waits = point(8000, (4000, 8.0, {1: 40}), (4000, 0.0, {2: 40}))
    found = judgement("bound_waits", asynchronous([waits]))
    assert "party 0 waited 20% of the time" in found.figures and "`sync=async`" in found.advice
    assert judgement("bound_waits", asynchronous()) is None


def test_the_page(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [*lines(), *UNEVEN])
    page = write_report([run], now=LATER).read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "Parties and staleness" in page and "Pushes of party 1 by age" in page
    assert 'aria-label="party 1: age 2: 20.0%, age 3: 80.0%"' in page
    plain = write(tmp_path / "plain", lines())
    assert "Parties and staleness" not in write_report([plain], now=LATER).read_text()
