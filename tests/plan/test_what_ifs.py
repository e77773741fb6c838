"""Texts of a question, what one change saves, and the way to a goal."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.costs.speed import Speed
from allstep.errors import ConfigError
from allstep.plan.answers.alone import batches_known, with_speeds
from allstep.plan.answers.goodput import Goal, Progress, best_way, efficiency, recommend
from allstep.plan.answers.plan_table import as_text, make_plan
from allstep.plan.answers.question_text import Alone, read_alone, read_workers, with_change
from allstep.plan.answers.what_ifs import best_changes, limit, limits, losses, what_ifs
from allstep.plan.calibration import Calibration, HostTimes, StepTimes
from allstep.plan.calibration_file import to_json
from allstep.plan.prediction import Question, knowledge, predict

NBYTES = tuple(4.0 * each for each in (9408, 147456, 589824, 2359296, 2048000))
LINK = Speed(30e-6, 6.25e9, math.inf)


def times(batch: int, factor: float = 1.0) -> StepTimes:
    compute = factor * (0.036 + 0.004 * batch)
    ready = tuple(compute * (1 - place / 8) for place in range(5))
    return StepTimes(batch, compute / 3, 2 * compute / 3, ready, 0.004, 0.0, 0.02)


SUMS = ((1e5, 3e-4), (1e6, 5e-4), (1e7, 2.5e-3))
HOST = HostTimes(8, times(64, 1.03), (), SUMS)
MADE = Calibration(NBYTES, (times(32), times(64)), 1_281_167, HOST)
KNOWN = knowledge(MADE)
ASKED = Question(8, batch=8192, link=LINK)


# Texts


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,2,4", [1, 2, 4]),
        ("1,2,4,...,64", [1, 2, 4, 8, 16, 32, 64]),
        ("1,2,...,16", [1, 2, 4, 8, 16]),
        ("2,4,6,...,12", [2, 4, 6, 8, 10, 12]),
        ("2,4,...,10", [2, 4, 6, 8, 10]),
        ("3", [3]),
    ],
)
def test_lists_of_workers(text: str, numbers: list[int]) -> None:
    assert read_workers(text) == numbers


@pytest.mark.parametrize(
    "text",
    ["", "2,1", "1,1", "1,...,4", "1,2,...", "1,2,...,7,8", "1,2,4,...,9", "0,1", "1,x", "1,-2",
     "1,2,3,...,100000", "1" * 400, "٣"],
)  # fmt: skip
def test_a_list_that_does_not_rise_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="rising order"):
        read_workers(text)


def test_speeds_of_one_worker() -> None:
    assert read_alone("219") == [Alone(219.0, None)]
    assert read_alone("219@64, 195@32") == [Alone(195.0, 32), Alone(219.0, 64)]


@pytest.mark.parametrize(
    "text", ["", "fast", "0", "219@0", "219@64,1@64", "219,195", "-3", "1e999"]
)
def test_other_speeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--alone"):
        read_alone(text)


def test_one_speed_is_not_enough_for_shares_that_shrink() -> None:
    with pytest.raises(ConfigError, match="two batches"):
        batches_known([Alone(219.0, 64)], 8192, None)
    with pytest.raises(ConfigError, match="SPEED@32"):
        batches_known([Alone(219.0, 64)], None, 32)
    assert batches_known([Alone(219.0, None)], None, 64) == [Alone(219.0, 64)]


def test_a_worker_elsewhere_has_the_given_speed() -> None:
    made = with_speeds(MADE, [Alone(195.0, 32), Alone(219.0, 64)])
    known = knowledge(made)
    assert known.level == 0
    for speed, batch in ((195.0, 32), (219.0, 64)):
        found = predict(made, known, Question(8, batch=batch), 1)
        assert found.samples_per_second == pytest.approx(speed)


@pytest.mark.parametrize(
    "text",
    ["link", "link=", "link=0x", "speed=2x", "algorithm=best", "gradients=int3", "slow=a:2",
     "slow=0.5", "slow=3:", "batch=x", "link=2x,,", "latency=-1x"],
)  # fmt: skip
def test_a_change_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError):
        with_change(ASKED, text)


def test_a_combination_changes_all_that_it_names() -> None:
    text = "slow=3:1.5,link=2x,latency=0.5x,gradients=bfloat16,batch=2x,input=3x,algorithm=ring"
    found = with_change(ASKED, text)
    assert (found.slow, found.slow_rank, found.link_rate, found.latency) == (1.5, 3, 2.0, 0.5)
    assert (found.gradients, found.batch, found.input) == (0.5, 16384, 3.0)
    assert found.algorithm == "ring"
    assert with_change(ASKED, "batch=64").batch == 64
    assert with_change(ASKED, "link=1GB/s").link == Speed(10e-6, 1e9, math.inf)


# What one change saves


def test_a_slow_worker_counts_where_it_takes_part() -> None:
    changed = with_change(ASKED, "slow=3:1.5")
    without, others = (predict(MADE, KNOWN, each, 2).seconds for each in (ASKED, changed))
    assert without == others
    found = predict(MADE, KNOWN, changed, 4)
    assert found.parts["imbalance"] == pytest.approx(
        0.5 * (found.parts["compute"] + found.parts["contention"])
    )


@given(st.sampled_from([1, 2, 8, 64, 512]), st.booleans())
@settings(max_examples=10)
def test_changes_are_listed_best_first_with_what_they_save(workers: int, weak: bool) -> None:
    question = Question(8, batch_per_worker=64, link=LINK) if weak else ASKED
    found = what_ifs(MADE, KNOWN, question, workers)
    saved = [each.saved for each in found]
    assert saved == sorted(saved, reverse=True)
    before = predict(MADE, KNOWN, question, workers).epoch
    assert all(each.before == pytest.approx(before) for each in found)
    names = [each.change for each in best_changes(found)]
    assert sum(name.startswith("algorithm=") for name in names) == (workers > 8)
    # A link that crosses no host is no change to try.
    assert ("link=2x" in names) == (workers > 8)


def test_a_measured_straggler_is_a_change_to_try() -> None:
    slow = replace(HOST, by_rank=(0.3,) * 7 + (0.45,))
    known = knowledge(replace(MADE, host=slow))
    found = what_ifs(MADE, known, ASKED, 64)
    assert next(each for each in found if each.change == "slow=1.0").saved > 0


@given(st.integers(1, 2048), st.booleans())
@settings(max_examples=25)
def test_losses_add_up_to_what_is_missing(workers: int, weak: bool) -> None:
    question = Question(8, batch_per_worker=64, link=LINK) if weak else ASKED
    one, found = (predict(MADE, KNOWN, question, each) for each in (1, workers))
    ideal = found.batch / (workers * one.samples_per_second)
    assert sum(losses(found, one).values()) == pytest.approx(found.seconds - ideal, abs=1e-9)


def test_the_part_that_limits_is_named() -> None:
    one = predict(MADE, KNOWN, ASKED, 1)
    assert limit(predict(MADE, KNOWN, ASKED, 8), one) is None
    assert limit(predict(MADE, KNOWN, ASKED, 4096), one) == "share"
    slow_link = replace(ASKED, link=Speed(1e-3, 1e7, math.inf))
    rows = [predict(MADE, KNOWN, slow_link, each) for each in (8, 16, 32)]
    assert limit(rows[1], one) == "exposed"
    assert [line.partition(":")[0] for line in limits(rows, one)] == [
        "8 workers",
        "16 to 32 workers",
    ]


def test_the_table_states_level_error_and_scaling() -> None:
    text = as_text(make_plan("r", MADE, KNOWN, ASKED, [1, 8, 64]))
    assert "strong scaling, batch 8,192" in text
    assert "level 2" in text
    assert "factor of 2 where the link limits" in text
    assert "at most 8 workers" in text
    weak = Question(8, batch_per_worker=64)
    text = as_text(make_plan("r", MADE, KNOWN, weak, [1, 2, 8]))
    assert "weak scaling, 64 samples per worker" in text
    assert "factor of 2" not in text


# Goodput

RESNET = Progress(4758, 9e7, "a test")


def test_best_batches_of_the_notes() -> None:
    """ResNet-50 on P100, 8 per host, 50 Gbit/s: plan-notes section 4, hours within a fifth."""
    published = {8: (1024, 14.5), 64: (4096, 2.3), 256: (8192, 0.76), 1024: (16384, 0.30)}
    for workers, (batch, hours) in published.items():
        found = best_way(MADE, KNOWN, ASKED, RESNET, workers)
        assert found.batch == batch
        assert found.seconds / 3600 == pytest.approx(hours, rel=0.2)


@given(st.sampled_from([1, 4, 16, 64, 256]), st.floats(1e3, 1e6))
@settings(max_examples=20)
def test_without_overlap_the_search_finds_the_closed_form(workers: int, critical: float) -> None:
    """One worker per host and no gradients: nothing overlaps, and the formula is exact."""
    quiet = Calibration((0.0,), (_bare(32), _bare(64)), 60_000)
    known, question = knowledge(quiet), Question(1, batch=64, link=LINK, jitter=0.0)
    found = best_way(quiet, known, question, Progress(100.0, 100 * critical, ""), workers)
    if found.batch > 2 * workers:
        assert 2**-0.51 <= found.batch / found.closed_form <= 2**0.51


def _bare(batch: int) -> StepTimes:
    compute = 0.036 + 0.004 * batch
    return StepTimes(batch, compute / 3, 2 * compute / 3, (compute,), 0.0, 0.0, 0.0)


def test_the_recommendation_follows_its_rule() -> None:
    goals = [best_way(MADE, KNOWN, ASKED, RESNET, each) for each in (1, 8, 64, 256, 1024, 4096)]
    one = goals[0]
    assert efficiency(one, one) == 1.0
    # The notes recommend 1,024 by the same rule.
    chosen = recommend(goals).chosen
    assert chosen is not None
    assert chosen.workers == 1024
    in_time = recommend(goals, deadline=3600.0).chosen
    assert in_time is not None
    assert in_time.workers == 256
    paid = recommend(goals, budget=130.0).chosen
    assert paid is not None
    assert paid.workers == 8
    assert recommend(goals, deadline=1.0).chosen is None
    assert recommend(goals, deadline=3600.0, budget=1.0).chosen is None


def test_memory_limits_the_batch_of_a_worker() -> None:
    found = best_way(MADE, KNOWN, ASKED, RESNET, 1, most_each=128)
    assert isinstance(found, Goal)
    assert found.batch == 128


# Files of the package that a plan needs


@pytest.mark.usefixtures("processes")
def test_a_plan_from_a_file_does_not_import_torch(tmp_path: Path) -> None:
    made = replace(MADE, facts={"model": "lenet", "options": "{}", "optimizer": "sgd"})
    (tmp_path / "c.json").write_text(to_json(made))
    script = (
        "import sys\nfrom allstep.cli.app import app\n"
        "app(['plan', 'digits', 'model.name=lenet', '--from', 'c.json', '--batch', '8192',"
        " '--link', '10Gbit/25us', '--workers', '1,2,4,...,4096'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "4,096" in ended.stdout
