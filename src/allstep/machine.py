"""What this machine allows us: cores and memory, as the kernel and the container limit them.

`os.cpu_count()` counts the machine; a job gets less. Three things cut it down and the smallest counts: the affinity mask (taskset,
Slurm, mpirun's binding), the cgroup's quota of CPU time (containers), and how many ranks share the rest.
"""

import os
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def allowed_cores() -> int:
    """Cores this process may use: its affinity mask, cut by the cgroup's CPU quota; at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), int(cpu_quota() or 1 << 20)))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """CPU time per wall time that the container's cgroup allows, in cores; None when it sets no limit."""
    folders = [cgroup, *_own_cgroups(cgroup)]
    quotas = [quota for folder in folders if (quota := _quota_in(folder)) is not None]
    return min(quotas) if quotas else None


def _own_cgroups(cgroup: Path) -> Iterable[Path]:
    """The folders of our own cgroup and of its parents below `cgroup` (version 2; version 1's cpu controller)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroup / "cpu" if controllers else cgroup
        yield root
        folder = root
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


def fair_share(mine: Iterable[int], everyone: Sequence[Iterable[int]], quota: float | None = None) -> int:
    """Threads for a rank whose affinity mask is `mine` when the ranks of its host have the masks `everyone` (its own among them).

    A core that k ranks may use counts 1/k: two ranks that share 8 cores get 4 each, two ranks bound to 8 cores each get 8.
    """
    masks = [frozenset(mask) for mask in everyone]
    share = sum((Fraction(1, sum(core in mask for mask in masks)) for core in set(mine)), Fraction())
    if quota is not None:
        share = min(share, Fraction(quota) / len(masks))
    return max(1, int(share))


def memory_available() -> int:
    """Bytes that can be allocated now: the kernel's MemAvailable, cut by what the cgroup has left."""
    available = _meminfo("MemAvailable")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
        except (OSError, ValueError):
            continue
    return available


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
