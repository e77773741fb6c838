"""How long a slow rank sleeps."""

import pytest

from allstep.faults import pace


class Clock:
    """A clock that a test moves; sleeping takes `late` seconds longer than asked for."""

    def __init__(self) -> None:
        self.now, self.late = 0.0, 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pace, "monotonic", lambda: made.now)
    monkeypatch.setattr(pace, "sleep", made.sleep)
    return made


def test_a_step_takes_the_factor_of_its_own_time(clock: Clock) -> None:
    slow = pace.Pace()
    # The start of a script's first step is not known.
    slow.sleep(3.0)
    clock.now = 10.0
    slow.begin()
    clock.now = 12.0
    slow.sleep(3.0)
    clock.now = 20.0
    slow.update_begins()
    clock.now = 20.5
    slow.end()
    # The next step of a script begins there. The wait for other ranks does not count.
    clock.now = 21.5
    slow.sleep(3.0)
    assert clock.slept == [pytest.approx(2 * 2.0), pytest.approx(2 * (1.0 + 0.5))]


def test_late_wake_ups_even_out(clock: Clock) -> None:
    slow, clock.late = pace.Pace(), 0.3
    for _ in range(50):
        slow.begin()
        clock.now += 0.1
        slow.sleep(3.0)
    assert clock.now == pytest.approx(50 * 0.3, abs=0.7)
    assert len(clock.slept) < 50
