"""Early stop of a run: after a signal of the queue system, or before its time limit.

```
SIGTERM, SIGUSR1   warning of the queue (also --stop-signal): noted only; the current step is
                   finished, but an evaluation is interrupted
--max-time         limit of the queue: stop earlier, by the time that a step, an evaluation and
                   a checkpoint take (at least 1 s)

max-time  |------ training ------|- step, evaluate, save -|
          start                  why: "--max-time ..."
```

A `Stopping` knows only its own rank. The loop adds `why` to a collective of every step, so that all
ranks stop after the same step, save, and exit with 75 ("saved, resubmit me"). In an elastic run a
signal may be meant for one host, which then leaves; only a confirmed signal is a request to stop
(`process.deferred_signals`).

The clock starts at the launch if `ALLSTEP_STARTED` (seconds since 1970) gives its time: workers
that needed a minute to find each other have a minute less. Otherwise it starts here. `allstep
train` adds the time since boot, which is used on the same host instead: a wall clock that is set
between the launch and the first step neither ends nor prolongs the run.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from allstep.errors import ConfigError
from allstep.launch import RESUBMIT
from allstep.launch.signals import heeded
from allstep.process.deferred_signals import DeferredSignals, die_of
from allstep.process.stop_signals import name_of, stop_signals
from allstep.wire.keys import TICKET

STARTED = "ALLSTEP_STARTED"
EVALUATION = "evaluation"
"""Name of the cost of an evaluation in `note_cost`."""
_MIN_MARGIN = 1.0
"""Minimum of the seconds that are reserved for the end of the run."""
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_UNITS_PATTERN = re.compile("".join(rf"(?:([\d.]+){unit})?" for unit in _UNITS), re.IGNORECASE)
_COLONS_PATTERN = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


class Stopping:
    """Request to stop, with its first reason. As a context manager it handles the signals.

    Signals are handled only in the main thread, where Python allows it. `max_seconds` is the time
    limit (None: no limit); `clock` returns seconds and is replaced in tests.
    """

    def __init__(
        self, max_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_seconds = max_seconds
        self._clock = clock
        self._end = None if max_seconds is None else clock() - seconds_since_launch() + max_seconds
        self._costs: dict[str, float] = {}
        self._why: str | None = None
        self._signaled = False
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    @property
    def why(self) -> str | None:
        """Return the reason to stop, or None; the first reason is kept.

        The call takes well under a microsecond.
        """
        if self._why is None and self._end is not None and self._end - self._clock() < self._margin:
            self._why = self._time_is_over()
        return self._why

    def must_leave(self) -> bool:
        """Return whether even a running evaluation must be interrupted.

        This is so after a signal, or if there is only time for a step and a checkpoint.
        """
        if self._end is None or self._signaled:
            return self._signaled
        rest = sum(seconds for what, seconds in self._costs.items() if what != EVALUATION)
        return self._end - self._clock() < max(_MIN_MARGIN, rest)

    def note_cost(self, what: str, seconds: float) -> None:
        """Record the seconds that a step, an evaluation or a checkpoint took.

        Each may occur between the request to stop and the end, so the maximum of each is reserved.
        """
        self._costs[what] = max(self._costs.get(what, 0.0), seconds)

    @property
    def _margin(self) -> float:
        """Return the seconds that are reserved for the end of the run."""
        return max(_MIN_MARGIN, sum(self._costs.values()))

    def _time_is_over(self) -> str:
        """Return the reason to stop before the time limit."""
        assert self._end is not None
        left = self._end - self._clock()
        given = f"--max-time {self._max_seconds:g} s"
        if left <= _MIN_MARGIN:
            return f"{given} is over"
        costs = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self._costs.items())
        return (
            f"{given} ends in {left:.1f} s, and finishing takes up to"
            f" {self._margin:.1f} s ({costs})"
        )

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            numbers = heeded(stop_signals(os.environ))
            if os.environ.get(TICKET):
                self._before = DeferredSignals(self._stop_by).install(numbers)
            else:
                self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _put_back(self._before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal as the reason to stop (signal handler)."""
        if os.getpid() != self._process:
            die_of(number)
        else:
            self._stop_by(number)

    def _stop_by(self, number: int) -> None:
        self._signaled = True
        self._why = self._why or name_of(number)


@contextmanager
def exit_on_signal(first: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Exit with "resubmit me" on a signal within the context, whatever the process waits for.

    For the preparations before `Stopping` handles signals, when there is nothing to save. first: is
    called before the exit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            die_of(number)
        else:
            _exit_without_saving(number, first)

    numbers = heeded(stop_signals(os.environ))
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        _put_back(before)


@contextmanager
def ignore_stop_signals() -> Iterator[None]:
    """Ignore stop signals in the context: the run has stopped, and its last action may cause one.

    Slurm sends SIGTERM to a job that is requeued.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = stop_signals(os.environ)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        _put_back(before)


def _exit_without_saving(number: int, first: Callable[[], None]) -> NoReturn:
    """Report the signal, call `first`, and end the process with "resubmit me"."""
    line = (
        f"allstep: stopped by {name_of(number)} while no step was running: there is nothing to save"
    )
    os.write(2, f"{line}\n".encode())
    try:
        with ignore_stop_signals():
            first()
    finally:
        os._exit(RESUBMIT)


def _put_back(handlers: Mapping[int, Any]) -> None:
    """Restore the former signal handlers."""
    for number, handler in handlers.items():
        # None means a handler that was not set by Python.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def launched_now() -> str:
    """Return the value of ALLSTEP_STARTED for a launch at this moment."""
    return f"{time.time()} {_boot_id()} {_seconds_since_boot()}"


def _boot_id() -> str:
    """Return an identifier of this boot of the host; "" if the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _seconds_since_boot() -> float:
    """Return the seconds since the host was booted, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def seconds_since_launch(env: Mapping[str, str] | None = None) -> float:
    """Return the seconds since the launch that `ALLSTEP_STARTED` gives.

    0 without it, or if the launch is in the future (the clocks of hosts differ). `env` replaces the
    environment.
    """
    text = (os.environ if env is None else env).get(STARTED)
    if not text:
        return 0.0
    try:
        wall, *booted = text.split()
        passed = time.time() - float(wall)
        if len(booted) == 2 and booted[0] == _boot_id():
            passed = _seconds_since_boot() - float(booted[1])
    except ValueError:
        raise ConfigError(f"{STARTED}={text!r} is not a number of seconds since 1970") from None
    return max(0.0, passed)


def parse_time(text: str, option: str = "--max-time") -> float:
    """Return the seconds of a time such as 90, 90s, 15m, 1h30m or 1.5h; `option` is for the error.

    Slurm's formats are accepted, too: 30:00 (minutes), 1:30:00, 1-12 (days, hours), 1-12:00:00. A
    bare number is seconds (in Slurm: minutes). Raise ConfigError for other texts.
    """
    seconds = _parse(text.strip())
    if seconds is None or not 0 < seconds < float("inf"):
        raise ConfigError(
            f"{option} {text!r} is not a time above 0: write 90 (seconds), 15m, 1h30m or 1:30:00"
        )
    return seconds


def _parse(text: str) -> float | None:
    """Return the seconds, or None if `text` is not a time."""
    try:
        if re.fullmatch(r"[\d.]+", text):
            return float(text)
        if text and (match := _UNITS_PATTERN.fullmatch(text)):
            by_unit = zip(match.groups(), _UNITS.values(), strict=True)
            return sum(float(number) * unit for number, unit in by_unit if number)
    except ValueError:
        # Such as 1.2.3.
        return None
    match = _COLONS_PATTERN.fullmatch(text)
    return None if match is None else _with_colons(*match.groups())


def _with_colons(
    days: str | None, first: str, second: str | None, third: str | None
) -> float | None:
    """Return the seconds of a time with colons, or None if it is not one.

    With days the first number is hours; else two numbers are minutes and seconds. Only the first
    number of all may be 60 or more.
    """
    d, a, b, c = (int(number or 0) for number in (days, first, second, third))
    if max(b, c) >= 60 or (days is not None and a >= 24):
        return None
    if days is None and third is None:
        return 60 * a + b
    return 86400 * d + 3600 * a + 60 * b + c
