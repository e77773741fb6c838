"""Facts from the kernel and the container: cores, shared memory, open files, folders, network.

All functions are fast, import no torch and start no program, so that a probe can call them on
another host.
"""

import os
import resource
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from allstep import machine
from allstep.process.thread_call import CallTimeout, call_within

_CGROUP = Path("/sys/fs/cgroup")
# cgroups v1 report a number near 2**63 for "no limit".
_NO_LIMIT = 1 << 60
_RESOLVE_SECONDS = 4.0


@dataclass(frozen=True)
class Cores:
    """Numbers of cores: of the machine, and what this process may use of them."""

    machine: int
    """Cores of the machine."""
    affinity: int
    """Cores in the affinity mask of this process."""
    quota: float | None
    """CPU time that the cgroup allows, in cores; None: no quota."""
    allowed: int
    """Cores that this process may use, with mask and quota."""


@dataclass(frozen=True)
class SharedMemory:
    """Shared memory that ranks of this host can use."""

    size: int | None
    """Bytes of /dev/shm; None if it does not exist."""
    free: int | None
    """Free bytes of /dev/shm; None if it does not exist."""
    memfd: bool
    """Whether memfd_create works; it does not need /dev/shm."""


@dataclass(frozen=True)
class Network:
    """Name and addresses of this machine."""

    hostname: str
    resolves_to: list[str] | None
    """Addresses of the host name; None: the name server did not answer in time."""
    interfaces: dict[str, list[str]]
    """Addresses by network interface."""


@dataclass(frozen=True)
class Folder:
    """A folder that a run may write to."""

    purpose: str
    path: str
    error: str | None
    """Reason why it cannot be written; None if it can."""


def cores() -> Cores:
    """Return the numbers of cores of this machine and this process."""
    mask = len(os.sched_getaffinity(0))
    return Cores(os.cpu_count() or mask, mask, machine.cpu_quota(), machine.allowed_cores())


def shared_memory() -> SharedMemory:
    """Return the state of /dev/shm and memfd_create."""
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return SharedMemory(None, None, _memfd_works())
    return SharedMemory(shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize, _memfd_works())


def _memfd_works() -> bool:
    """Return whether memory from memfd_create can be allocated."""
    try:
        fd = os.memfd_create("allstep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return False
    try:
        os.posix_fallocate(fd, 0, 1 << 16)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def network() -> Network:
    """Return the name and addresses of this machine."""
    name = socket.gethostname()
    return Network(name, resolve(name), machine.interfaces())


def resolve(name: str, seconds: float = _RESOLVE_SECONDS) -> list[str] | None:
    """Return the addresses of a host name: [] if it has none, None without an answer in time."""
    # A lookup cannot be interrupted: one that hangs stays behind in a thread that blocks nothing.
    try:
        found = call_within(lambda: socket.getaddrinfo(name, None), seconds, "allstep-resolve")
    except CallTimeout:
        return None
    except OSError:
        return []
    return sorted({str(info[4][0]) for info in found})


def open_files() -> tuple[int, int]:
    """Return the soft and the hard limit on open files of a process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def folder(purpose: str, path: Path) -> Folder:
    """Test whether a run can write to `path`, or to its nearest parent that exists."""
    return Folder(purpose, str(path), _why_not_writable(path))


def _why_not_writable(path: Path) -> str | None:
    """Return the error of a write to the nearest existing parent; None if it works."""
    try:
        while not path.exists():
            path = path.parent
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def temporary_folder() -> Folder:
    """Return Python's folder for temporary files, with an error if TMPDIR cannot be used."""
    asked = os.environ.get("TMPDIR")
    try:
        path = Path(tempfile.gettempdir())
    except OSError as error:
        return Folder("temporary files", asked or "", str(error.strerror or error))
    if asked and Path(asked).absolute() != path.absolute():
        return Folder(
            "temporary files",
            str(path),
            f"TMPDIR={asked} cannot be written; {path} is used instead",
        )
    return folder("temporary files", path)
