"""Early stop of a run: signals as the kernel delivers them, a clock that the test sets, times as in
Slurm's manual.
"""

import os
import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import ConfigError
from allstep.train.health.stop import (
    STARTED,
    Stopping,
    exit_on_signal,
    launched_now,
    parse_time,
    seconds_since_launch,
)
from support.ranks import Ranks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STARTED, raising=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_old_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Stopping() as stopping:
        assert stopping.why is None
        os.kill(os.getpid(), number)
        assert stopping.why == number.name
        os.kill(os.getpid(), signal.SIGUSR1)  # the first one counts
        assert stopping.why == number.name
    assert signal.getsignal(number) is before
    assert stopping.why == number.name


def test_another_thread_takes_no_signals_but_knows_the_time() -> None:
    before, clock, found = signal.getsignal(signal.SIGTERM), Clock(), []

    def body() -> None:
        with Stopping(5, clock) as stopping:
            found.append(signal.getsignal(signal.SIGTERM))
            clock.now += 10
            found.append(stopping.why)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [before, "--max-time 5 s is over"]


def test_the_time_is_over_a_second_before_its_end() -> None:
    clock = Clock()
    stopping = Stopping(3600, clock)
    clock.now += 3598.9
    assert stopping.why is None
    clock.now += 0.2
    assert stopping.why == "--max-time 3600 s is over"


def test_what_comes_before_the_end_is_kept_free() -> None:
    clock = Clock()
    stopping = Stopping(100, clock)
    for what, seconds in (
        ("step", 2.0),
        ("evaluation", 15.0),
        ("checkpoint", 13.0),
        ("checkpoint", 5.0),
        ("step", 1.0),
    ):
        stopping.note_cost(what, seconds)  # the dearest of each counts
    clock.now += 69
    assert stopping.why is None
    clock.now += 2
    assert not stopping.must_leave()  # an evaluation that has begun has its time
    why = stopping.why
    costs = "step 2.0 s, evaluation 15.0 s, checkpoint 13.0 s"
    assert why == f"--max-time 100 s ends in 29.0 s, and finishing takes up to 30.0 s ({costs})"
    clock.now += 15
    assert stopping.must_leave()  # only a step and a checkpoint have
    clock.now += 35
    assert stopping.why == why


def test_the_clock_starts_at_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setenv(STARTED, str(time.time() - 1000))
    assert Stopping(5000, clock).why is None
    assert Stopping(900, clock).why == "--max-time 900 s is over"


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_clock_that_was_set_after_the_launch_does_not_count(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    launched, real = launched_now(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
    assert 0 <= seconds_since_launch({STARTED: launched}) < 600
    wall, _, boot = launched.split()
    on_another_host = f"{wall} another-boot {boot}"
    assert seconds_since_launch({STARTED: on_another_host}) == pytest.approx(
        max(0, 3600 * hours), abs=600
    )


def test_a_launch_in_the_future_is_now_and_nonsense_is_an_error() -> None:
    assert seconds_since_launch({STARTED: str(time.time() + 1000)}) == 0
    with pytest.raises(ConfigError, match="ALLSTEP_STARTED='soon'"):
        seconds_since_launch({STARTED: "soon"})


def fork_and_wait() -> tuple[int, str | None]:
    """Return what SIGTERM does to a child that was forked within the context."""
    ready, send_ready = os.pipe()
    with Stopping() as stopping:
        child = os.fork()
        if child == 0:
            os.write(send_ready, b"!")  # Python forgets signals that come during the fork itself
            for _ in range(6000):
                time.sleep(0.01)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), stopping.why


def test_a_forked_child_still_dies_of_a_signal(ranks: Ranks) -> None:
    """A pool of workers ends its processes by SIGTERM, which they must not handle."""
    assert ranks(1, fork_and_wait) == [(-signal.SIGTERM, None)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("15m", 900),
        ("1h30m", 5400),
        ("1H30M5S", 5405),
        ("1.5h", 5400),
        ("2d", 172800),
        (" 1:30:00 ", 5400),
        ("30:00", 1800),
        ("100:30", 6030),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-00:00:01", 86401),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "soon", "1h30", "30m1h", "1:60", "1:2:3:4", "1.2.3", ".", "inf", "1-24", "5 m"],
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-time .* is not a time above 0: write 90"):
        parse_time(text)


@given(st.integers(0, 9), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_units_and_colons_mean_the_same(days: int, hours: int, minutes: int, seconds: int) -> None:
    expected = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert parse_time(f"{days}-{hours:02}:{minutes:02}:{seconds:02}") == expected
    assert parse_time(f"{days}d{hours}h{minutes}m{seconds}s") == expected


def stopped_before_the_first_step(number: int, forked: bool) -> int:
    """Return the exit status, or minus the signal, of a process that is stopped while it prepares.

    With `forked`, of a process that was forked from it.
    """
    child = os.fork()
    if child == 0:
        with exit_on_signal():
            if forked:
                grandchild = os.fork()
                if grandchild == 0:
                    os.kill(os.getpid(), number)
                    time.sleep(30)
                os._exit(
                    7 if os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == -number else 8
                )
            os.kill(os.getpid(), number)
            time.sleep(30)
        os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step(ranks: Ranks, number: signal.Signals) -> None:
    """There is nothing to save: resubmit. A forked process is ended by the signal."""
    assert ranks(1, stopped_before_the_first_step, int(number), False) == [75]
    assert ranks(1, stopped_before_the_first_step, int(number), True) == [7]


def test_old_handlers_come_back_when_no_signal_came() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with exit_on_signal():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_ignored_signal_stays_ignored() -> None:
    """A signal that is ignored on entry was ignored on purpose, as `nohup` does with SIGHUP."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Stopping() as stopping:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
            assert stopping.why is None
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
