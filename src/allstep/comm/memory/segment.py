"""Memory that all ranks of a host map.

One rank, the first, makes a segment and says where it is; the others map it, and all agree that
they could. Two ways, tried in order:

* `memfd_create`: memory without a name. The others reach it as /proc/<pid>/fd/<n>, so nothing is
  left behind whatever dies, and a container's small /dev/shm does not matter. A process number may
  mean another process in another namespace, so the link's name and a random number in the memory
  itself are checked before it is trusted.
* a file in /dev/shm, for hosts where /proc does not let us: it is unlinked as soon as all have
  mapped it. It stays locked until then, and the next start removes unlocked files that a kill left.

The memory is reserved (`posix_fallocate`) after a look at what is free, sealed against shrinking
and touched at once: a segment that does not fit is an error here, never a SIGBUS later. Tensors are
made from a memoryview, which pins the map as long as one lives; the map is never closed by hand.

    | nonce, 16 bytes | ... to 4096 | what the segment is for ...
"""

import contextlib
import fcntl
import json
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

from allstep import machine
from allstep.comm.join.store import collect
from allstep.errors import CommError
from allstep.files.lock import try_lock

HEADER = 4096
_SHM = Path("/dev/shm")
_KEEP_FREE = 64 << 20  # bytes that a segment leaves to everybody else
_NONCE = 16


@dataclass(frozen=True)
class Segment:
    """Mapped memory. `view` is all of it behind the header."""

    view: memoryview
    nbytes: int


def share(store: Store, rank: int, size: int, nbytes: int, seconds: float) -> Segment:
    """A segment of `nbytes` that all `size` ranks of `store` have mapped. All call it together.

    Raises CommError on all ranks when any of them cannot map it in either way.
    """
    reasons = []
    for name, make in (("memfd", _make_memfd), ("shm", _make_file)):
        with contextlib.ExitStack() as cleaning:
            segment, reason = _try(store, name, rank, nbytes, seconds, make, cleaning)
            reason = _first_reason(store, name, rank, size, reason, seconds)
            if segment is not None and not reason:
                return segment
            reasons.append(f"{name}: {reason}")
    raise CommError(f"the ranks cannot share memory ({'; '.join(reasons)})", rank=rank)


_Make = Callable[[int, str, contextlib.ExitStack], tuple[int, str]]


def _try(
    store: Store,
    name: str,
    rank: int,
    nbytes: int,
    seconds: float,
    make: _Make,
    cleaning: contextlib.ExitStack,
) -> tuple[Segment | None, str]:
    """Make or map it; on failure the reason."""
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
        store.wait([f"{name}/card"], timedelta(seconds=seconds))
        card = json.loads(store.get(f"{name}/card"))
        if "error" in card:
            return None, card["error"]
        return _open(card["path"], card["nonce"], nbytes), ""
    except (OSError, ValueError) as error:
        return None, str(error)


def _first_reason(store: Store, name: str, rank: int, size: int, mine: str, seconds: float) -> str:
    """Why some rank could not; empty when all could. The same on all ranks."""
    answers = collect(store, f"{name}/mapped", rank, size, mine or "yes", seconds)
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
    """Between making and locking it the sweep of another run may take it for one that a kill left:
    then once more."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def sweep() -> None:
    """Remove the files of ours that a kill left: those that nobody has locked."""
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
            f"{nbytes} bytes of shared memory do not fit into the {available} bytes that are free"
        )
    os.posix_fallocate(fd, 0, nbytes)


def _open(path: str, nonce: str, nbytes: int) -> Segment:
    if (
        path.startswith("/proc/")
        and (found := str(Path(path).readlink())) != f"/memfd:allstep-{nonce} (deleted)"
    ):
        raise OSError(f"{path} is {found}, which is not our memory (another PID namespace?)")
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
        raise OSError("the memory does not hold the number that it should")
    return Segment(whole[HEADER:], nbytes)


def parts(segment: Segment, *sizes: int) -> Iterator[memoryview]:
    """The segment cut into pieces of these sizes, each beginning on a page of its own."""
    at = 0
    for size in sizes:
        yield segment.view[at : at + size]
        at += rounded(size)


def rounded(nbytes: int) -> int:
    """Up to whole pages."""
    return -(-nbytes // HEADER) * HEADER
