"""The parts of a step: they add up to it, whatever the record, and name a worker that is late."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.study.scale.parts import PARTS, measured_step
from support.synthetic_runs import lines, record

BATCH = 10  # a line of these records has 100 samples

fractions = st.floats(0.0, 0.05)
worlds = st.integers(1, 6).flatmap(
    lambda size: st.fixed_dictionaries(
        {
            phase: st.lists(fractions, min_size=size, max_size=size)
            for phase in ("input", "compute", "wait", "update")
        }
    )
)


@given(worlds, st.floats(0.1, 2.0))
def test_the_parts_add_up_to_the_step(times: dict[str, list[float]], seconds: float) -> None:
    size = len(times["input"])
    found = measured_step(record(lines(workers=size, times=times, seconds=seconds)), BATCH)
    assert found is not None
    assert found.seconds == pytest.approx(seconds / 10)
    assert tuple(found.parts) == PARTS
    assert math.isclose(sum(found.parts.values()), found.seconds, rel_tol=1e-9, abs_tol=1e-12)
    assert found.parts["imbalance"] >= -1e-12
    assert found.samples_per_second == pytest.approx(100 / seconds)


def test_equal_workers_have_no_imbalance() -> None:
    times = {"input": [0.05], "compute": [0.3], "wait": [0.1], "update": [0.04]}
    found = measured_step(record(lines(workers=3, times=times, seconds=0.5)), BATCH)
    assert found is not None
    expected = {"input": 5, "compute": 30, "imbalance": 0, "exposed": 10, "update": 4, "rest": 1}
    assert {name: 1e3 * value for name, value in found.parts.items()} == pytest.approx(
        expected, abs=1e-9
    )
    assert (found.late, found.lateness) == (None, 1.0)


def test_a_late_worker_is_named_and_its_cost_is_its_own() -> None:
    """Worker 1 of 4 has half a core: the others wait 0.3 s of each line for it, and 0.05 s for
    gradients."""
    times = {
        "input": [0.0] * 4,
        "compute": [0.3, 0.6, 0.3, 0.3],
        "wait": [0.35, 0.05, 0.35, 0.35],
        "update": [0.05] * 4,
    }
    found = measured_step(record(lines(workers=4, times=times, seconds=0.7)), BATCH)
    assert found is not None
    assert found.late == 1
    assert found.lateness == pytest.approx(0.65 / 0.35)
    expected = {"input": 0, "compute": 30, "imbalance": 30, "exposed": 5, "update": 5, "rest": 0}
    assert {name: 1e3 * value for name, value in found.parts.items()} == pytest.approx(
        expected, abs=1e-9
    )


def test_a_short_run_has_no_step() -> None:
    assert measured_step(record(lines(epochs=1, per_epoch=1)), BATCH) is None
    assert measured_step(record([]), BATCH) is None
