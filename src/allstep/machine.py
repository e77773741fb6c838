"""The resources of this machine within the limits of kernel and container.

These are cores, memory, network interfaces, and whether the CPU computes in bfloat16.

`os.cpu_count()` counts the cores of the machine; a process may use fewer. Three limits apply, and
the smallest counts: the affinity mask (taskset, Slurm, mpirun's binding), the cgroup's quota of CPU
time (containers), and the number of ranks that share the rest.
"""

import ctypes
import errno
import fcntl
import os
import resource
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 64 << 20
_SIOCGIFADDR = 0x8915
_THREADS = "OMP_NUM_THREADS"
_THREADS_BY_ALLSTEP = "ALLSTEP_THREADS"
# cgroup version 1 has a number near 2**63 for "no limit".
_NO_LIMIT = 1 << 60
_CPUINFO = Path("/proc/cpuinfo")

MAX_TASKS = 1024
"""Upper limit of the threads or processes that one number in a config or option may start."""
BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16", "svebf16", "bf16")
"""CPU flags of instructions that multiply bfloat16 numbers; the last two are ARM's."""
_WITHOUT_BFLOAT16 = {
    "ONEDNN_MAX_CPU_ISA": (
        "sse41",
        "avx",
        "avx2",
        "avx2_vnni",
        "avx2_vnni_2",
        "avx512_core",
        "avx512_core_vnni",
    ),
    "ATEN_CPU_CAPABILITY": ("default", "avx2"),
}
_WITHOUT_BFLOAT16["DNNL_MAX_CPU_ISA"] = _WITHOUT_BFLOAT16["ONEDNN_MAX_CPU_ISA"]
"""Values that limit torch's kernels to instructions without bfloat16, by environment variable."""


def allowed_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    The affinity mask and the cgroup's CPU quota limit it.
    """
    return max(1, min(len(os.sched_getaffinity(0)), int(cpu_quota() or 1 << 20)))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """Return the CPU time per wall time that the cgroup allows, in cores; None without a limit."""
    folders = [cgroup, *_own_cgroups(cgroup, "cpu")]
    quotas = [quota for folder in folders if (quota := _quota_in(folder)) is not None]
    return min(quotas) if quotas else None


def _own_cgroups(cgroup: Path, controller: str) -> Iterable[Path]:
    """Yield the folders of this process's cgroup and of its parents, all below `cgroup`.

    In version 1, these are below the folder of the `controller`.
    """
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = cgroup / controller if controllers else cgroup
        yield folder
        for part in Path(path.lstrip("/")).parts:
            folder = folder / part
            yield folder


def _quota_in(folder: Path) -> float | None:
    """Return the CPU quota of one cgroup, in cores; None without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    if quota in ("max", "-1"):
        return None
    return float(quota) / float(period)


def fair_share(
    mine: Iterable[int], everyone: Sequence[Iterable[int]], quota: float | None = None
) -> int:
    """Return the number of threads for a rank with the affinity mask `mine`.

    everyone: the masks of all ranks of its host, its own included. quota: CPU quota of the host's
    ranks together, in cores. A core that k ranks may use counts 1/k: two ranks that share 8 cores
    get 4 each, two ranks bound to 8 cores each get 8.
    """
    masks = [frozenset(mask) for mask in everyone]
    share = sum(
        (Fraction(1, sum(core in mask for mask in masks)) for core in set(mine)), Fraction()
    )
    if quota is not None:
        share = min(share, Fraction(quota) / len(masks))
    return max(1, int(share))


def estimated_share(num_workers: int) -> int:
    """Return the number of threads for a worker that does not know the masks of the others.

    num_workers: workers of this host. The launcher, which is the parent of this process, may use
    the cores of all of them: a worker that it has bound to some cores gets these, up to an equal
    part of the launcher's cores. See `fair_share` for the exact number.
    """
    mine = allowed_cores()
    try:
        together = len(os.sched_getaffinity(os.getppid()))
    # The launcher has ended, or may not be looked at.
    except OSError:
        together = mine
    equal = min(max(mine, together), int(cpu_quota() or 1 << 20)) // num_workers
    return max(1, min(mine, equal))


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str] | None:
    """Return the instruction-set flags that all cores have; None if the kernel lists none.

    cpuinfo: the kernel's file with one block per core; the line is called "flags" on x86 and
    "Features" on ARM.
    """
    cores = [
        frozenset(value.split())
        for name, _, value in (line.partition(":") for line in _lines(str(cpuinfo)))
        if name.strip() in ("flags", "Features")
    ]
    return frozenset.intersection(*cores) if cores else None


@dataclass(frozen=True)
class Bfloat16:
    """Whether a processor computes in bfloat16 (None: unknown), and the reason in one line."""

    native: bool | None
    why: str


def cpu_bfloat16(flags: frozenset[str] | None, environ: Mapping[str, str] = os.environ) -> Bfloat16:
    """Return whether a CPU with these `flags` (see `cpu_flags`) computes in bfloat16.

    environ: variables that may limit the instructions of torch's kernels. AVX-512 alone is not
    enough: without `avx512_bf16` every product is emulated in float32.
    """
    if flags is None:
        return Bfloat16(None, "the kernel lists no CPU flags")
    found = next((flag for flag in BFLOAT16_FLAGS if flag in flags), None)
    if found is None:
        return Bfloat16(
            False,
            "this CPU has no bfloat16 arithmetic: none of its flags is"
            f" {' or '.join(BFLOAT16_FLAGS)}",
        )
    for name, values in _WITHOUT_BFLOAT16.items():
        if environ.get(name, "").lower() in values:
            return Bfloat16(False, f"{name}={environ[name]} switches off the {found} of this CPU")
    return Bfloat16(True, f"this CPU computes in it, flag {found}")


def threads_by_user(env: Mapping[str, str]) -> str | None:
    """Return OMP_NUM_THREADS if the user set it; None if it is unset, empty or set by allstep.

    `thread_variables` marks its choice with a second variable of the same value. If a script
    changes OMP_NUM_THREADS, the two differ, and its number counts.
    """
    value = env.get(_THREADS)
    return value if value and value != env.get(_THREADS_BY_ALLSTEP) else None


def thread_variables(env: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each worker of this host, unless the user set it.

    The variable is for programs that never call `allstep.init()`.
    """
    if threads_by_user(env):
        return {}
    return threads_by_allstep(max(1, allowed_cores() // num_workers))


def threads_by_allstep(share: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for `share` threads, marked for `threads_by_user`."""
    return {_THREADS: str(share), _THREADS_BY_ALLSTEP: str(share)}


@dataclass(frozen=True)
class Memory:
    """The memory of this machine, in bytes.

    total: of the machine. available: can be allocated now. limit: the smallest limit of a cgroup,
    None without one.
    """

    total: int
    available: int
    limit: int | None


def memory() -> Memory:
    """Return the memory of the machine, and how much of it this process may use."""
    limits = [
        (limit, limit - used)
        for folder in _own_cgroups(_CGROUP, "memory")
        if (limit := _memory_limit(folder)) is not None
        and (used := _memory_used(folder)) is not None
    ]
    available = min([_meminfo("MemAvailable"), *(left for _, left in limits)])
    return Memory(
        _meminfo("MemTotal"), max(0, available), min((limit for limit, _ in limits), default=None)
    )


def _memory_limit(folder: Path) -> int | None:
    limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
    return limit if limit is not None and limit < _NO_LIMIT else None


def _memory_used(folder: Path) -> int | None:
    """Return the bytes in use of a cgroup, without the page cache that the kernel can drop."""
    used = _first_number(folder, "memory.current", "memory.usage_in_bytes")
    if used is None:
        return None
    stat = dict(line.split() for line in _lines(str(folder / "memory.stat")))
    return used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _first_number(folder: Path, *names: str) -> int | None:
    for name in names:
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return None


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def largest_cache(folder: Path = _CACHES) -> int:
    """Return the bytes of the last-level cache; 64 MB where the kernel does not report one."""
    return max(cache_sizes(folder).values(), default=_UNKNOWN_CACHE)


def cache_sizes(folder: Path = _CACHES) -> dict[int, int]:
    """Return the bytes of the data caches by level (1, 2, ...); empty if they are not reported."""
    sizes: dict[int, int] = {}
    for index in sorted(folder.glob("index*")):
        kind, level, size = (
            "".join(_lines(str(index / name))) for name in ("type", "level", "size")
        )
        if (
            kind != "Instruction"
            and level.isdecimal()
            and size[:-1].isdecimal()
            and size[-1:] in "KM"
        ):
            sizes[int(level)] = int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]
    return sizes


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 if unknown."""
    return next(
        (int(line.split()[1]) for line in _lines("/proc/vmstat") if line.startswith("oom_kill ")), 0
    )


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface that is up, IPv4 first."""
    found: dict[str, list[str]] = {}
    for _, name in socket.if_nameindex():
        address = _ipv4_of(name)
        found[name] = [address] if address else []
    for line in _lines("/proc/net/if_inet6"):
        digits, _, _, scope, _, name = line.split()
        # Not link-local addresses (scope 20), which need the name of the interface.
        if scope != "20":
            found.setdefault(name, []).append(
                socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            )
    return found


def _ipv4_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface, or None."""
    request = struct.pack("16s16x8x", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def _lines(path: str) -> list[str]:
    """Return the lines of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def outside_addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one."""
    return [address for name, found in interfaces().items() if name != "lo" for address in found]


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address, or None."""
    return next((name for name, found in interfaces().items() if address in found), None)


def route_to(address: str) -> str | None:
    """Return the local address from which packets to `address` leave; None without a route.

    Sends nothing.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def keep_freed_memory() -> bool:
    """Let malloc keep freed memory for the next step; return whether that was possible.

    By default glibc returns tensors of 32 MB and more to the system, which then has to clear the
    same pages again in every step. Other C libraries do not have the call.
    """
    # Numbers of the parameters in malloc.h.
    mmap_max, trim_threshold = -4, -1
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, -1))


def why_no_start(error: OSError, num_workers: int) -> str:
    """Return one line about the limit of this host that prevented the start of a worker."""
    advice = ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        enough = max(1024, 4 * num_workers)
        advice = f"; the limit is {soft}, each worker takes 3: raise it with `ulimit -n {enough}`"
    return f"cannot start {num_workers} workers: {error.strerror or error}{advice}"
