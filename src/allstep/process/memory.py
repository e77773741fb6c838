"""How much memory processes use, as the kernel counts it.

```
resident       pages in memory; shared pages count fully (RSS)
proportional   pages in memory; a page shared by n processes counts 1/n in each (PSS)
```
"""

import contextlib
import ctypes
import os
import re
from collections.abc import Iterable
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_PSS_WRITTEN = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)


def resident_nbytes() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def proportional_nbytes(pids: Iterable[int]) -> int:
    """Return the bytes that the processes `pids` use together; pages that they share count once.

    A process that has ended counts 0.
    """
    return sum(_pss(pid, _PSS) for pid in pids)


def written_nbytes() -> int:
    """Return the proportional bytes of this process without pages that it has only read from files.

    Freed memory that malloc keeps for later use does not count.
    """
    ctypes.CDLL(None).malloc_trim(0)
    return _pss(os.getpid(), _PSS_WRITTEN)


def _pss(pid: int, lines: re.Pattern[str]) -> int:
    """Return the bytes of the matching lines of /proc/<pid>/smaps_rollup; 0 if it has ended."""
    with contextlib.suppress(OSError):
        found = lines.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())
        return sum(map(int, found)) << 10
    return 0
