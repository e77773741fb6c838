"""Whether the run should stop early: the queue system has sent a signal, or the time it was given
is nearly over.

```
queue's warning   SIGTERM or SIGUSR1    -> noted, not acted on: the step under way is finished; an evaluation is cut short
queue's limit     --max-time            -> before it is over, by what a step, an evaluation and a checkpoint take (at least 1 s)

time given  |------ training ------|- step, evaluate, save -|
            start                  why: "--max-time ..."
```

A `Stopping` knows only about its own rank. The loop adds what `why` says to a collective of every
step, so that all ranks stop after the same one, save, and exit with 75 ("saved, resubmit me").

The clock runs from the launch where `ALLSTEP_STARTED` (seconds since 1970) tells when that was:
workers that took a minute to find each other have a minute less. Without it, it runs from here.
`allstep train` adds the time since boot, which on the same host counts instead: a wall clock that
is set between the launch and the first step neither ends nor prolongs the run.
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
from typing import Any

from allstep.errors import ConfigError
from allstep.launch import RESUBMIT
from allstep.launch.signals import heeded

STARTED = "ALLSTEP_STARTED"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EVALUATION = "evaluation"
"""The name of its cost."""
_LEAST_MARGIN = 1.0
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_UNITS_PATTERN = re.compile("".join(rf"(?:([\d.]+){unit})?" for unit in _UNITS), re.IGNORECASE)
_COLONS_PATTERN = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


class Stopping:
    """Notes the first reason to stop. Within `with` it takes the signals (in the main thread, where
    Python allows it).

    max_seconds: None for no limit. clock: seconds, for tests.
    """

    def __init__(
        self, max_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_seconds = max_seconds
        self._clock = clock
        self._end = None if max_seconds is None else clock() - seconds_since_launch() + max_seconds
        self._costs: dict[str, float] = {}
        self._why: str | None = None
        self._told = False
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    @property
    def why(self) -> str | None:
        """The reason, once there is one; it stays. Costs well under a microsecond."""
        if self._why is None and self._end is not None and self._end - self._clock() < self._margin:
            self._why = self._time_is_over()
        return self._why

    def must_leave(self) -> bool:
        """Whether even an evaluation that has begun is too much: after a signal, or when only a
        step and a checkpoint have time."""
        if self._end is None or self._told:
            return self._told
        rest = sum(seconds for what, seconds in self._costs.items() if what != EVALUATION)
        return self._end - self._clock() < max(_LEAST_MARGIN, rest)

    def note_cost(self, what: str, seconds: float) -> None:
        """What a step, an evaluation or a checkpoint took: any of them may lie between the word to
        stop and the end.

        The most that was ever noted of each is kept free.
        """
        self._costs[what] = max(self._costs.get(what, 0.0), seconds)

    @property
    def _margin(self) -> float:
        return max(_LEAST_MARGIN, sum(self._costs.values()))

    def _time_is_over(self) -> str:
        assert self._end is not None
        left = self._end - self._clock()
        given = f"--max-time {self._max_seconds:g} s"
        if left <= _LEAST_MARGIN:
            return f"{given} is over"
        costs = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self._costs.items())
        return (
            f"{given} is over in {left:.1f} s, and what may come before the end takes up to"
            f" {self._margin:.1f} s ({costs})"
        )

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in heeded(SIGNALS)}
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
        if os.getpid() != self._process:
            _die_of(number)
        else:
            self._told = True
            self._why = self._why or signal.Signals(number).name


@contextmanager
def leave_when_told() -> Iterator[None]:
    """While a process makes ready, before `Stopping` listens: a signal ends it with "resubmit me",
    since there is nothing to save.

    At once, whatever it is waiting for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            _die_of(number)
            return
        line = (
            f"allstep: told to stop by {signal.Signals(number).name} while no step was under way:"
            " there is nothing to save"
        )
        os.write(2, f"{line}\n".encode())
        os._exit(RESUBMIT)

    before = {number: signal.signal(number, leave) for number in heeded(SIGNALS)}
    try:
        yield
    finally:
        _put_back(before)


def _die_of(number: int) -> None:
    """A process that was forked from one that listens must die of the signal, as its parent means
    it to."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(
            number, signal.SIG_DFL if handler is None else handler
        )  # None: one that Python did not set


def launched_now() -> str:
    """Return the value of ALLSTEP_STARTED for a launch at this moment."""
    return f"{time.time()} {_boot_id()} {_seconds_since_boot()}"


def _boot_id() -> str:
    """Return a name for this host since it was booted; empty where the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def seconds_since_launch(env: Mapping[str, str] | None = None) -> float:
    """Seconds since the launch that `ALLSTEP_STARTED` tells of; 0 when it does not, or lies in the
    future (clocks of hosts differ)."""
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


def parse_time(text: str) -> float:
    """Seconds, from 90, 90s, 15m, 1h30m, 1.5h, or as Slurm writes them: 30:00 (minutes), 1:30:00,
    1-12 (days, hours), 1-12:00:00.

    A bare number is seconds (Slurm would take it for minutes).
    """
    seconds = _parse(text.strip())
    if seconds is None or not 0 < seconds < float("inf"):
        raise ConfigError(
            f"--max-time {text!r} is not a time above 0: write 90 (seconds), 15m, 1h30m or 1:30:00"
        )
    return seconds


def _parse(text: str) -> float | None:
    try:
        if re.fullmatch(r"[\d.]+", text):
            return float(text)
        if text and (match := _UNITS_PATTERN.fullmatch(text)):
            return sum(
                float(part) * unit
                for part, unit in zip(match.groups(), _UNITS.values(), strict=True)
                if part
            )
    except ValueError:  # 1.2.3
        return None
    match = _COLONS_PATTERN.fullmatch(text)
    return None if match is None else _with_colons(*match.groups())


def _with_colons(
    days: str | None, first: str, second: str | None, third: str | None
) -> float | None:
    """With days the first number is hours; else two numbers are minutes and seconds.

    Only the first of all may be 60 and more.
    """
    d, a, b, c = (int(part or 0) for part in (days, first, second, third))
    if max(b, c) >= 60 or (days is not None and a >= 24):
        return None
    if days is None and third is None:
        return 60 * a + b
    return 86400 * d + 3600 * a + 60 * b + c
