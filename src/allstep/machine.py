"""What this machine gives us: cores and memory as the kernel and the container limit them, its
network interfaces, and whether its CPU computes in bfloat16.

`os.cpu_count()` counts the machine; a job gets less. Three things cut it down and the smallest
counts: the affinity mask (taskset, Slurm, mpirun's binding), the cgroup's quota of CPU time
(containers), and how many ranks share the rest.
"""

import ctypes
import fcntl
import os
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
_NO_LIMIT = 1 << 60  # version 1 says "none" with a number near 2**63
_CPUINFO = Path("/proc/cpuinfo")

MOST_TASKS = 1024
"""Threads or processes that one number in a config or on the command line may start here."""
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
    """Cores this process may use: its affinity mask, cut by the cgroup's CPU quota; at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), int(cpu_quota() or 1 << 20)))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """CPU time per wall time that the container's cgroup allows, in cores; None when it sets no
    limit."""
    folders = [cgroup, *_own_cgroups(cgroup, "cpu")]
    quotas = [quota for folder in folders if (quota := _quota_in(folder)) is not None]
    return min(quotas) if quotas else None


def _own_cgroups(cgroup: Path, controller: str) -> Iterable[Path]:
    """The folders of our own cgroup and of its parents below `cgroup` (version 2; version 1's
    folder of the controller)."""
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
    """Threads for a rank whose affinity mask is `mine` when the ranks of its host have the masks
    `everyone` (its own among them).

    A core that k ranks may use counts 1/k: two ranks that share 8 cores get 4 each, two ranks bound
    to 8 cores each get 8.
    """
    masks = [frozenset(mask) for mask in everyone]
    share = sum(
        (Fraction(1, sum(core in mask for mask in masks)) for core in set(mine)), Fraction()
    )
    if quota is not None:
        share = min(share, Fraction(quota) / len(masks))
    return max(1, int(share))


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str] | None:
    """Return the instruction-set flags that all cores have; None where the kernel lists none.

    cpuinfo: the kernel's description of the cores, a block for each; the line is called "flags" on
    x86 and "Features" on ARM.
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
    """Judge the CPU by its `flags` (see `cpu_flags`), within `environ`'s limits for torch's
    kernels.

    AVX-512 alone is not enough: without `avx512_bf16` every product is emulated in float32.
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
    """Return OMP_NUM_THREADS if the user set it; None where it is unset, empty, or our own choice.

    `thread_variables` marks its choice with a second variable of the same value. A script that
    changes OMP_NUM_THREADS itself makes them differ, and its number counts.
    """
    value = env.get(_THREADS)
    return value if value and value != env.get(_THREADS_BY_ALLSTEP) else None


def thread_variables(env: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """Return each worker's share of this host's cores, for programs that never call
    `allstep.init()`."""
    if threads_by_user(env):
        return {}
    share = str(max(1, allowed_cores() // num_workers))
    return {_THREADS: share, _THREADS_BY_ALLSTEP: share}


@dataclass(frozen=True)
class Memory:
    """Bytes.

    `available` can be allocated now; `limit` is the smallest that a cgroup sets, None without one.
    """

    total: int
    available: int
    limit: int | None


def memory() -> Memory:
    """What the machine has, and what of it the kernel and our cgroups leave us."""
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
    """Bytes in use that the kernel cannot simply drop: files that it only keeps for speed do not
    count."""
    used = _first_number(folder, "memory.current", "memory.usage_in_bytes")
    stat = dict(line.split() for line in _lines(str(folder / "memory.stat")))
    return (
        None
        if used is None
        else used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    )


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
    """Bytes of the last-level cache; `_UNKNOWN_CACHE` where the kernel does not report one."""
    return max(cache_sizes(folder).values(), default=_UNKNOWN_CACHE)


def cache_sizes(folder: Path = _CACHES) -> dict[int, int]:
    """Bytes of the caches that hold data, by level (1, 2, ...); empty where the kernel does not
    report them."""
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
    """How many processes the kernel has killed for want of memory since boot; 0 where it does not
    say."""
    return next(
        (int(line.split()[1]) for line in _lines("/proc/vmstat") if line.startswith("oom_kill ")), 0
    )


def interfaces() -> dict[str, list[str]]:
    """The network interfaces that are up, each with its addresses (IPv4 first)."""
    found: dict[str, list[str]] = {}
    for _, name in socket.if_nameindex():
        address = _ipv4_of(name)
        found[name] = [address] if address else []
    for line in _lines("/proc/net/if_inet6"):
        digits, _, _, scope, _, name = line.split()
        if scope != "20":  # link-local addresses are of no use without naming the interface
            found.setdefault(name, []).append(
                socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            )
    return found


def _ipv4_of(interface: str) -> str | None:
    request = struct.pack("16s16x8x", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def outside_addresses() -> list[str]:
    """The addresses at which other hosts may reach this one."""
    return [address for name, found in interfaces().items() if name != "lo" for address in found]


def interface_of(address: str) -> str | None:
    """The interface that has this address."""
    return next((name for name, found in interfaces().items() if address in found), None)


def route_to(address: str) -> str | None:
    """The address of ours from which packets to `address` leave; None when there is no way there.

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
    """Lets this process keep what it frees, for the next step: glibc gives tensors of 32 MB and
    more back to the system, which then has to clear the same pages anew in every step. Whether that
    was possible (it is a matter of glibc)."""
    mmap_max, trim_threshold = -4, -1  # the parameters' numbers in malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, -1))
