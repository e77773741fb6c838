"""How much memory processes use, as the kernel counts it.

```
resident       pages in memory; those shared with others count fully
proportional   pages in memory; those shared by n processes count 1/n each (PSS)
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
    """Return the bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def proportional_nbytes(pids: Iterable[int]) -> int:
    """Return the bytes that some processes use together: what they share counts once.

    A process that has ended counts nothing.
    """
    return sum(_pss(pid, _PSS) for pid in pids)


def written_nbytes() -> int:
    """Return the bytes of this process without what it has only read from files.

    Of what it shares, its share counts. Memory that was freed and kept for later use does not.
    """
    ctypes.CDLL(None).malloc_trim(0)
    return _pss(os.getpid(), _PSS_WRITTEN)


def _pss(pid: int, lines: re.Pattern[str]) -> int:
    with contextlib.suppress(OSError):
        found = lines.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())
        return sum(map(int, found)) << 10
    return 0
