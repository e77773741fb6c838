"""What the kernel and the container give us: cores, memory, shared memory, open files, folders,
names and addresses.

Everything here is quick, loads no torch and starts no program, so a probe on another host can tell
the same of itself.
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
_NO_LIMIT = 1 << 60  # version 1 of cgroups writes a number near 2**63 for "none"
_RESOLVE_SECONDS = 4.0


@dataclass(frozen=True)
class Cores:
    """Whole machine; our affinity mask; the cgroup's quota of CPU time; what is left of it for us."""

    machine: int
    affinity: int
    quota: float | None
    allowed: int


@dataclass(frozen=True)
class SharedMemory:
    """Bytes of /dev/shm (None where there is none), and whether memfd_create, which needs none,
    works."""

    size: int | None
    free: int | None
    memfd: bool


@dataclass(frozen=True)
class Network:
    """Our interfaces with their addresses, our name, and what it resolves to (None: the name server
    did not answer in time)."""

    hostname: str
    resolves_to: list[str] | None
    interfaces: dict[str, list[str]]


@dataclass(frozen=True)
class Folder:
    """A folder that a run may write to, and why it cannot (None when it can)."""

    purpose: str
    path: str
    error: str | None


def cores() -> Cores:
    mask = len(os.sched_getaffinity(0))
    return Cores(os.cpu_count() or mask, mask, machine.cpu_quota(), machine.allowed_cores())


def shared_memory() -> SharedMemory:
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return SharedMemory(None, None, _memfd_works())
    return SharedMemory(shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize, _memfd_works())


def _memfd_works() -> bool:
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
    name = socket.gethostname()
    return Network(name, resolve(name), machine.interfaces())


def resolve(name: str, seconds: float = _RESOLVE_SECONDS) -> list[str] | None:
    """The addresses of a host name, [] when it has none, None when nobody answered in time."""
    # A lookup cannot be interrupted: one that hangs is left behind in a thread that holds up
    # nobody.
    try:
        found = call_within(lambda: socket.getaddrinfo(name, None), seconds, "allstep-resolve")
    except CallTimeout:
        return None
    except OSError:
        return []
    return sorted({str(info[4][0]) for info in found})


def open_files() -> tuple[int, int]:
    """How many files a process may have open: the limit in force, and up to where it may be raised."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def folder(purpose: str, path: Path) -> Folder:
    """Tries to write there, below the nearest parent that exists: a run makes what is missing."""
    return Folder(purpose, str(path), _why_not_writable(path))


def _why_not_writable(path: Path) -> str | None:
    try:
        while not path.exists():
            path = path.parent
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def temporary_folder() -> Folder:
    """The one that Python settles on; an error names what was asked for and cannot be used."""
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
