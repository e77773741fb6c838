"""How long a slow rank sleeps."""

import pytest

from allstep.faults import pace


def test_a_step_takes_the_factor_of_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pace, "monotonic", lambda: now)
    slow = pace.Pace()
    # The start of a script's first step is not known.
    assert slow.extra(3.0) == 0.0
    now = 10.0
    slow.begin()
    now = 12.0
    assert slow.extra(3.0) == pytest.approx(2 * 2.0)
    now = 20.0
    slow.update_begins()
    now = 20.5
    slow.end()
    # The next step of a script begins there. The wait for other ranks does not count.
    now = 21.5
    assert slow.extra(3.0) == pytest.approx(2 * (1.0 + 0.5))
    assert slow.extra(1.0) == 0.0
