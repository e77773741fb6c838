"""Whether another process of this host is alive, ending or gone.

A process that is killed is *ending* long before it is gone. The kernel first marks each of its
tasks (threads) as exiting, then frees the memory, and only after that closes its files and makes
its pidfd readable. For a worker with gigabytes that takes a second or more.

========  ==========================================================  =========================
state     condition                                                   cost of the check
========  ==========================================================  =========================
gone      its pidfd is readable                                       one system call, 1 us
ending    every task under /proc/<pid>/task has the flag PF_EXITING   10 us with any task count
========  ==========================================================  =========================

An exiting task never returns to the program, so an ending process writes nothing more: not to
memory that it shares, not to a socket. A main thread may end while other threads continue. That is
not the end of the process, so all tasks must have the flag.

The main thread is checked first, so a living process costs one read. A reused pid does no harm: the
pidfd and the open folder of /proc both belong to the process that had the pid when they were
opened, and a second process with this pid is never read. Where /proc does not show the process
(`hidepid`), only the pidfd is available, and the end is noticed when the memory has been freed.

`is_ending` is meant for long waits: call it after some milliseconds of waiting, and then every 20
to 50 ms.
"""

import contextlib
import os
import select
import threading
import weakref
from pathlib import Path

_PF_EXITING = 0x4
# Index of the flags among the fields after the name: state, ppid, pgrp, session, tty, tpgid, flags.
_FLAGS = 6
# Index of the status for waitpid, field 52 of the whole line.
_EXIT_STATUS = 49


class Life:
    """The state of one process. Raises OSError if there is no such process or no access to it.

    Get it from `life_of`, so that all process groups in this process share one object.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._gone = False
        self._main = f"task/{pid}/stat"
        self._folder = _folder_of(pid)
        # The folder is opened by pid: if the process still exists afterwards, it is its own.
        if self._folder is not None and (
            self.has_ended() or not _can_read(self._main, self._folder)
        ):
            os.close(self._folder)
            self._folder = None

    def fileno(self) -> int:
        """Return the pidfd, for select and poll: it becomes readable when the process is gone."""
        return self._pidfd

    @property
    def shows_tasks(self) -> bool:
        """Return whether its tasks can be read; if not, it counts as alive until it is gone."""
        return self._folder is not None

    def has_ended(self) -> bool:
        """Return whether the process is gone, reaped or not."""
        if not self._gone:
            # A new object each time: several threads may call this, and one object refuses that.
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            self._gone = bool(poll.poll(0))
        return self._gone

    def is_ending(self) -> bool:
        """Return whether the process runs no more user code: gone, or all its tasks are exiting."""
        if self.has_ended():
            return True
        if self._folder is None:
            return False
        try:
            return _is_exiting(self._main, self._folder) and _all_exiting(self._folder)
        except OSError:
            # Gone meanwhile, or this process is out of file descriptors: ask the pidfd.
            return self.has_ended()

    def ending_code(self) -> int | None:
        """Return the exit code of a process that is ending, as subprocess does; None if unknown.

        The kernel knows the code before it frees the memory. It shows 0 to callers that may not
        see it, so 0 is never returned: wait for the process instead.
        """
        if self._folder is None or not self.is_ending():
            return None
        try:
            stat = _read("stat", self._folder)
        except OSError:
            return None
        status = exit_status_of(stat)
        return os.waitstatus_to_exitcode(status) if status else None

    def __del__(self) -> None:
        for fd in (getattr(self, "_pidfd", None), getattr(self, "_folder", None)):
            if fd is not None:
                os.close(fd)


class _Lives:
    """The `Life` objects of this process, by pid."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, Life] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def of(self, pid: int) -> Life:
        """Return the `Life` of the process that has this pid now."""
        with self._lock:
            known = self._known.get(pid)
            if known is None or known.has_ended():
                known = self._known[pid] = Life(pid)
            return known

    def forget(self) -> None:
        """Start empty in a forked process: the lock may have been held at the time of the fork."""
        self._lock = threading.Lock()
        self._known.clear()


_lives = _Lives()


def life_of(pid: int) -> Life:
    """Return the `Life` of the process that has this pid now.

    All callers share one object, with two file descriptors.
    """
    return _lives.of(pid)


def namespace() -> str:
    """Return the name of this process's pid namespace; "" where it is not known.

    Two processes of a host may use each other's pids if they have the same. Containers of one host
    may differ.
    """
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def birth(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it is gone.

    A later process with the same pid has another start time.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _folder_of(pid: int) -> int | None:
    try:
        return os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None


def _can_read(path: str, folder: int) -> bool:
    try:
        return _flags_in(path, folder) is not None
    except OSError:
        return False


def _all_exiting(folder: int) -> bool:
    """Return whether all tasks are exiting.

    A listed task may start another before it exits, so the list is read twice.
    """
    tasks = _tasks_in(folder)
    exiting = all(_is_exiting(f"task/{task}/stat", folder) for task in tasks)
    return exiting and _tasks_in(folder) <= tasks


def _tasks_in(folder: int) -> set[str]:
    fd = os.open("task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return set(os.listdir(fd))
    finally:
        os.close(fd)


def _is_exiting(path: str, folder: int) -> bool:
    """Return whether a task is exiting; one that has vanished has exited."""
    flags = _flags_in(path, folder)
    return flags is None or bool(flags & _PF_EXITING)


def _flags_in(path: str, folder: int) -> int | None:
    """Return the kernel's flags of a task; None if the task does not exist any more."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return flags_of(_read(path, folder))
    return None


def _read(path: str, folder: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def flags_of(stat: bytes) -> int:
    """Return the kernel's flags in a `stat` file; its name may have spaces and parentheses."""
    return int(stat.rpartition(b")")[2].split()[_FLAGS])


def exit_status_of(stat: bytes) -> int:
    """Return the status, as waitpid has it, in the `stat` file of a process that is ending."""
    return int(stat.rpartition(b")")[2].split()[_EXIT_STATUS])


os.register_at_fork(after_in_child=_lives.forget)
