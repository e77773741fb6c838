"""A program that runs a command and kills it, with all its descendants, when its runner ends.

    runner ══ pipe (stdin) ══> supervisor ──> command ──> processes that the command starts

    python -I -S ... allstep.process.supervisor LOCK COMMAND...   (`run_bare`)

When the command ends, the supervisor kills the processes that the command left behind and exits
with the command's status (128 + n for signal n). When the pipe ends, because the runner closed it
or was killed, the supervisor kills everything at once. As "subreaper" the supervisor inherits every
orphan below it, so that it also finds those in a session of their own. If the supervisor itself is
killed, the kernel kills the command.

LOCK is a file that stays locked as long as a process of the command may still run: the supervisor
of a second runner waits for it.

The module needs only the standard library and `family`, so that it starts in 20 ms.
"""

import fcntl
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from allstep.process.family import adopt_orphans, die_with_parent, kill_children

# Between two tries to take a lock that another process holds.
_LOCK_MILLISECONDS = 20


def main(lock: str, *command: str) -> int:
    """Run `command` while holding the file `lock`; return its exit status."""
    adopt_orphans()
    with Path(lock).open("ab") as held:
        if not _take(held.fileno()):
            return 128 + signal.SIGKILL
        try:
            return _run(command)
        finally:
            kill_children()


def _take(lock: int) -> bool:
    """Wait for the lock; return False if the runner ends before."""
    while not _runner_is_gone(0):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _runner_is_gone(_LOCK_MILLISECONDS)
        else:
            return True
    return False


def _runner_is_gone(milliseconds: int) -> bool:
    """Wait for the end of the runner, at most `milliseconds`; return whether it has ended.

    The runner never writes to the pipe, so any event there is its end.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(milliseconds))


def _run(command: tuple[str, ...]) -> int:
    """Run the command until it or the runner ends; return the exit status."""
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
