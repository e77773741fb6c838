"""The names of stop signals, and signals that wait for their confirmation."""

import os
import signal
import subprocess
import sys

import pytest

from allstep.errors import ConfigError
from allstep.process.stop_signals import VARIABLE, name_of, parse, stop_signals


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("USR2", signal.SIGUSR2),
        ("sigusr2", signal.SIGUSR2),
        ("12", 12),
        (" HUP ", signal.SIGHUP),
        ("RTMIN+1", signal.SIGRTMIN + 1),
        ("SIGRTMAX-2", signal.SIGRTMAX - 2),
        ("40", 40),
    ],
)
def test_a_signal_has_a_name_or_a_number(text: str, number: int) -> None:
    assert parse(text) == number
    assert stop_signals({VARIABLE: text}) == (signal.SIGTERM, signal.SIGUSR1, number)
    assert parse(name_of(number)) == number


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("KILL", "no process can catch it"),
        ("9", "no process can catch it"),
        ("INT", "Ctrl-C"),
        ("URG", "agents confirm"),
        ("SEGV", "crashes"),
        ("USR3", "did you mean USR"),
        ("RTMIN+99", "no such signal"),
        ("0", "no such signal"),
        ("999", "no such signal"),
        ("", "no such signal"),
    ],
)
def test_a_signal_that_cannot_be_used(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=r"--stop-signal") as raised:
        parse(text)
    assert error in str(raised.value) and "\n" not in str(raised.value)


def test_without_the_option_there_are_two() -> None:
    assert stop_signals({}) == (signal.SIGTERM, signal.SIGUSR1)
    assert stop_signals({VARIABLE: "TERM"}) == (signal.SIGTERM, signal.SIGUSR1)


WORKER = """
import os, signal, sys
from allstep.process.deferred_signals import CONFIRM, defer_stop_signals
own = signal.SIGUSR1
signal.signal(own, lambda *_: print("own handler", flush=True))
defer_stop_signals({"ALLSTEP_STOP_SIGNAL": "RTMIN+2"})
for word in sys.argv[1:]:
    os.kill(os.getpid(), getattr(signal, word, None) or signal.SIGRTMIN + 2)
    print(word, flush=True)
print("end", flush=True)
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("sent", "printed", "code"),
    [
        ("SIGTERM SIGURG", "SIGTERM", -signal.SIGTERM),
        ("RT SIGURG", "RT", -(signal.SIGRTMIN + 2)),
        # Python may call the handler of SIGURG first, whatever came first.
        ("SIGURG RT", "SIGURG", -(signal.SIGRTMIN + 2)),
        ("SIGTERM SIGTERM", "SIGTERM SIGTERM end", 0),
        ("SIGUSR1 SIGTERM SIGURG", "own handler SIGUSR1 SIGTERM", -signal.SIGTERM),
    ],
)
def test_only_a_confirmed_signal_ends_a_worker(sent: str, printed: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *sent.split()],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert (" ".join(done.stdout.split()), done.returncode) == (printed, code), done.stderr
