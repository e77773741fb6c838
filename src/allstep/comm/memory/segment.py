"""Memory that all ranks of a host map.

The first rank creates a segment and publishes its path; the others map it, and all ranks agree on
whether every rank succeeded. Two methods are tried in order:

* `memfd_create`: memory without a name. The others open it as /proc/<pid>/fd/<n>, so nothing is
  left behind whichever process is killed, and a container's small /dev/shm does not matter. A pid
  may belong to another process in another namespace, so the link's name and a random number in the
  memory itself are checked first.
* a file in /dev/shm, for hosts where /proc does not permit the first: it is unlinked as soon as all
  ranks have mapped it. It is locked until then, and the next start removes unlocked files that a
  killed run left.

The memory is reserved (`posix_fallocate`) after a check of the free memory, sealed against
shrinking and touched at once: a segment that does not fit raises an error here and never causes a
SIGBUS later. Tensors are made from a memoryview, which keeps the map alive as long as one exists;
the map is never closed explicitly.

    | nonce, 16 bytes | ... up to 4096 | contents ...
"""

import contextlib
import fcntl
import json
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import Store

from allstep import machine
from allstep.comm.join.launcher_store import collect, wait_for
from allstep.errors import CommError
from allstep.files.lock import try_lock

HEADER = 4096
_SHM = Path("/dev/shm")
# Bytes of memory that a segment leaves free for other processes.
_KEEP_FREE = 64 << 20
_NONCE = 16


@dataclass(frozen=True)
class Segment:
    """Mapped memory. `view` is all of it after the header; `nonce` identifies it."""

    view: memoryview
    nbytes: int
    nonce: str


class CannotShare(CommError):
    """The ranks of a host cannot map the same memory."""


_Check = Callable[[], None] | None


def share(
    store: Store, rank: int, size: int, nbytes: int, seconds: float, check: _Check = None
) -> Segment:
    """Return a segment of `nbytes` that all `size` ranks of `store` have mapped.

    All ranks call it together; `seconds` limits the wait for each other, and `check` may end it
    (see `wait_for`). Raises CannotShare on all ranks if any of them cannot map it by either method.
    """
    reasons = []
    for name, make in (("memfd", _make_memfd), ("shm", _make_file)):
        with contextlib.ExitStack() as cleaning:
            segment, reason = _try(store, name, rank, nbytes, seconds, check, make, cleaning)
            reason = _first_reason(store, name, rank, size, reason, seconds, check)
            if segment is not None and not reason:
                return segment
            reasons.append(f"{name}: {reason}")
    raise CannotShare(f"the ranks cannot share memory ({'; '.join(reasons)})", rank=rank)


_Make = Callable[[int, str, contextlib.ExitStack], tuple[int, str]]


def _try(
    store: Store,
    name: str,
    rank: int,
    nbytes: int,
    seconds: float,
    check: _Check,
    make: _Make,
    cleaning: contextlib.ExitStack,
) -> tuple[Segment | None, str]:
    """Create or map the segment; return it, or None and the reason."""
    try:
        if rank == 0:
            nonce = secrets.token_hex(_NONCE // 2)
            try:
                fd, path = make(nbytes + HEADER, nonce, cleaning)
            except OSError as error:
                store.set(f"{name}/card", json.dumps({"error": str(error)}))
                raise
            segment = _map(fd, nbytes, nonce, is_maker=True)
            store.set(f"{name}/card", json.dumps({"path": path, "nonce": nonce}))
            return segment, ""
        wait_for(store, [f"{name}/card"], seconds, check)
        card = json.loads(store.get(f"{name}/card"))
        if "error" in card:
            return None, card["error"]
        return _open(card["path"], card["nonce"], nbytes), ""
    except (OSError, ValueError) as error:
        return None, str(error)


def _first_reason(
    store: Store, name: str, rank: int, size: int, mine: str, seconds: float, check: _Check
) -> str:
    """Return why some rank could not map it, the same on all ranks; empty if all could."""
    answers = collect(store, f"{name}/mapped", rank, size, mine or "yes", seconds, check)
    return next(
        (f"rank {other}: {answer}" for other, answer in enumerate(answers) if answer != "yes"), ""
    )


def _make_memfd(nbytes: int, nonce: str, cleaning: contextlib.ExitStack) -> tuple[int, str]:
    fd = os.memfd_create(f"allstep-{nonce}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    cleaning.callback(os.close, fd)
    _reserve(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def _make_file(nbytes: int, nonce: str, cleaning: contextlib.ExitStack) -> tuple[int, str]:
    sweep()
    path = _SHM / f"allstep-{os.getuid()}-{nonce}"
    fd = _create_locked(path)
    cleaning.callback(os.close, fd)
    cleaning.callback(path.unlink, missing_ok=True)
    _reserve(fd, nbytes)
    return fd, str(path)


def _create_locked(path: Path) -> int:
    """Create a file and lock it.

    The sweep of another run may unlink the file before it is locked; then try again.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def sweep() -> None:
    """Remove the files that killed runs of this user left: those that no process has locked."""
    for path in _SHM.glob(f"allstep-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if try_lock(fd):
                    path.unlink()
            finally:
                os.close(fd)


def _reserve(fd: int, nbytes: int) -> None:
    available = machine.memory().available
    if nbytes + _KEEP_FREE > available:
        raise OSError(
            f"{nbytes} bytes of shared memory do not fit into {available} bytes of free memory"
        )
    os.posix_fallocate(fd, 0, nbytes)


def _open(path: str, nonce: str, nbytes: int) -> Segment:
    if (
        path.startswith("/proc/")
        and (found := str(Path(path).readlink())) != f"/memfd:allstep-{nonce} (deleted)"
    ):
        raise OSError(f"{path} is {found}, not our memory (perhaps another PID namespace)")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map(fd, nbytes, nonce, is_maker=False)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int, nonce: str, *, is_maker: bool) -> Segment:
    whole = memoryview(mmap.mmap(fd, nbytes + HEADER, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    if is_maker:
        whole[:_NONCE] = nonce.encode()
    elif bytes(whole[:_NONCE]) != nonce.encode():
        raise OSError("the memory has another nonce than expected: it is not our segment")
    return Segment(whole[HEADER:], nbytes, nonce)


def parts(segment: Segment, *sizes: int) -> Iterator[memoryview]:
    """Yield views of the segment with these sizes in bytes, each starting on a page of its own."""
    at = 0
    for size in sizes:
        yield segment.view[at : at + size]
        at += rounded(size)


def rounded(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // HEADER) * HEADER
