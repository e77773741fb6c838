"""Names in a folder of checkpoints.

```
000000055000                     a checkpoint: samples seen, at least 12 digits, padded with zeros
.000000110000.4711-88231         being written by process 4711, started at clock tick 88231 ...
.000000055000.4711-88231.gone    ... or being removed by it
```

Digits are 0 to 9. `str.isdigit` also accepts others, such as "²" or Arabic ones, which `int`
refuses or reads as the number of another folder. This module needs no torch, so a launcher can
import it.
"""

import os
import re
from pathlib import Path

_NUMBER = re.compile(r"[0-9]{12,18}")
_HIDDEN = re.compile(r"\.[0-9]{12,18}\.([0-9]{1,10})(?:-([0-9]{1,20}))?(?:\.gone)?")


def number_of(name: str) -> int | None:
    """Return the samples that the name of a checkpoint states; None for any other name."""
    number = int(name) if _NUMBER.fullmatch(name) else None
    return number if number is not None and name_of(number) == name else None


def name_of(samples: int) -> str:
    """Return the name of the checkpoint after `samples` samples."""
    return f"{samples:012}"


def hidden_name(name: str) -> str:
    """Return the name under which this process writes the checkpoint `name`."""
    return f".{name}.{os.getpid()}-{_started(os.getpid()) or 0}"


def is_left_over(name: str) -> bool:
    """Return whether a hidden name belongs to no running writer.

    A name of this process counts as left over, because it writes one checkpoint at a time.
    """
    found = _HIDDEN.fullmatch(name)
    if found is None:
        return False
    pid, started = int(found[1]), found[2]
    # The start time distinguishes processes with the same pid, which repeat in containers.
    return (
        pid == os.getpid()
        or (now := _started(pid)) is None
        or (started is not None and int(started) != now)
    )


def _started(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of a process; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        # Field 22. The name, field 2, may contain spaces and parentheses.
        return int(stat.rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
