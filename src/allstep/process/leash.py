"""A program that runs a command on a leash: whoever started it holds the other end, and nothing
outlives that.

    runner ══ pipe ══> leash ──> command ──> whatever it starts

    python -I -S ... allstep.process.leash LOCK COMMAND...   (`run_bare`)

The command ends: whatever it left behind is killed, and its exit status is ours (128 + n for signal
n). The pipe ends, because the runner closed it or was killed itself: everything is killed at once.
As "subreaper" the leash inherits every orphan below it, so that it finds also those that have a
session of their own. Should the leash itself be killed, the kernel kills the command.

LOCK is a file that is locked as long as anything may still run: a second runner's leash waits there
until the first is through.

It needs nothing but the standard library and `family`, so that starting it takes 20 ms.
"""

import fcntl
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from allstep.process.family import adopt_orphans, die_with_parent, kill_children

_LOCK_MILLISECONDS = 20  # between two looks at a lock that is taken


def main(lock: str, *command: str) -> int:
    """The exit status of the command."""
    adopt_orphans()
    with Path(lock).open("ab") as held:
        if not _take(held.fileno()):
            return 128 + signal.SIGKILL
        try:
            return _run(command)
        finally:
            kill_children()


def _take(lock: int) -> bool:
    """Waits for the lock; False when the runner is gone before that."""
    while not _runner_is_gone(0):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _runner_is_gone(_LOCK_MILLISECONDS)
        else:
            return True
    return False


def _runner_is_gone(milliseconds: int) -> bool:
    """The runner never writes: whatever comes from the pipe is its end."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(milliseconds))


def _run(command: tuple[str, ...]) -> int:
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
        )
    except OSError as error:
        print(f"{command[0]}: cannot be started: {error.strerror or error}", file=sys.stderr)
        return 127
    poll = select.poll()
    for fd in (0, os.pidfd_open(process.pid)):
        poll.register(fd, select.POLLIN | select.POLLHUP)
    poll.poll()
    code = process.poll()
    if code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code
