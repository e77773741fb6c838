"""What a victim does to its own process or to its agent; needs no other part of allstep.

Faults of tensors, files and connections are carried out by the packages that own them: they ask the
`Injector` whether one is due.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from allstep.errors import ConfigError
from allstep.faults.spec import Fault

AGENT = "ALLSTEP_AGENT"
"""The environment variable with the process number of the agent that started a worker."""

_FORWARD_SECONDS = 0.2
# Waits until the process is stopped, since a signal to continue that comes first has no effect.
_CONTINUE = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
try:
    while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "Tt":
        time.sleep(0.002)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
except (FileNotFoundError, ProcessLookupError):
    pass
"""


class InjectedFault(RuntimeError):
    """The exception of the fault `raise`."""


def kill(fault: Fault) -> None:
    """End this process at once, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def exit_now(fault: Fault) -> None:
    """End this process without clean-up; what was printed is written first."""
    assert fault.value is not None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(fault.value))


def raise_error(fault: Fault) -> None:
    """Raise InjectedFault."""
    raise InjectedFault(f"injected by fault {fault}")


def stop(fault: Fault) -> None:
    """Stop this process for some seconds; a small child process lets it continue."""
    assert fault.value is not None
    command = [sys.executable, "-I", "-S", "-c", _CONTINUE, str(os.getpid()), str(fault.value)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)
    child.wait()


def hang(fault: Fault) -> None:
    """Wait forever; signals are handled, but do not end the wait."""
    while True:
        threading.Event().wait(3600)


def kill_agent(fault: Fault) -> None:
    """Kill the agent, the parent of this host's workers; the kernel then kills these."""
    # The agent still has to forward our report.
    time.sleep(_FORWARD_SECONDS)
    os.kill(agent_pid(fault), signal.SIGKILL)


def agent_pid(fault: Fault) -> int:
    """Return the process number of our agent; ConfigError if no launcher of allstep started us."""
    pid = os.environ.get(AGENT, "")
    if not pid.isdecimal():
        raise ConfigError(
            f"fault '{fault}': this process has no agent; start it with allstep run or allstep"
            " train, or use kill"
        )
    return int(pid)


ACTS: dict[str, Callable[[Fault], None]] = {
    "kill": kill,
    "exit": exit_now,
    "raise": raise_error,
    "stop": stop,
    "hang": hang,
    "kill-agent": kill_agent,
}
