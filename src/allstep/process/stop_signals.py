"""The signals that ask a run to save and stop: SIGTERM, SIGUSR1, and the one of `--stop-signal`.

Launcher, agents and workers read the variable `ALLSTEP_STOP_SIGNAL`, so that all of them agree.
"""

import re
import signal
from collections.abc import Mapping
from difflib import get_close_matches

from allstep.errors import ConfigError, cut

VARIABLE = "ALLSTEP_STOP_SIGNAL"
"""Environment variable with the name or number of one more signal."""
_USUAL = (signal.SIGTERM, signal.SIGUSR1)
# Why a signal cannot be the one to stop.
_REFUSED = {
    signal.SIGKILL: "no process can catch it",
    signal.SIGSTOP: "no process can catch it",
    signal.SIGCHLD: "the kernel sends it for each child that ends",
    signal.SIGURG: "agents confirm signals to elastic workers with it",
    signal.SIGINT: "it is that of Ctrl-C, which ends a run without saving",
    **dict.fromkeys(
        (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT),
        "the kernel sends it to a program that crashes",
    ),
}
_REAL_TIME = re.compile(r"RTM(IN|AX)(?:([+-])([0-9]{1,2}))?")


def parse(text: str) -> int:
    """Return the number of a signal: `USR2`, `SIGUSR2`, `12`, `RTMIN+1`; ConfigError otherwise."""
    name = text.strip().upper().removeprefix("SIG")
    number = _number(name)
    if number is None:
        known = [each.name.removeprefix("SIG") for each in signal.Signals]
        near = get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]}?" if near else "expected a name such as USR2, or a number"
        raise ConfigError(f"--stop-signal {cut(text)}: there is no such signal; {advice}")
    if number in _REFUSED:
        raise ConfigError(
            f"--stop-signal {cut(text)}: {_REFUSED[signal.Signals(number)]}; choose another one,"
            " such as USR2"
        )
    return number


def _number(name: str) -> int | None:
    if match := _REAL_TIME.fullmatch(name):
        first = signal.SIGRTMIN if match[1] == "IN" else signal.SIGRTMAX
        number = first + int(f"{match[2] or '+'}{match[3] or 0}")
        return number if signal.SIGRTMIN <= number <= signal.SIGRTMAX else None
    if re.fullmatch("[0-9]{1,3}", name):
        return int(name) if int(name) in signal.valid_signals() else None
    found = getattr(signal, f"SIG{name}", None)
    return int(found) if isinstance(found, signal.Signals) else None


def stop_signals(env: Mapping[str, str]) -> tuple[int, ...]:
    """Return the signals that ask a run to stop; ConfigError for a wrong variable."""
    text = env.get(VARIABLE)
    return tuple(dict.fromkeys([*_USUAL, parse(text)])) if text else _USUAL


def name_of(number: int) -> str:
    """Return the name of a signal: `SIGUSR1`; real-time signals without one as `SIGRTMIN+3`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
