"""Files on their way: what is being written has a name that ends in `.part`, until it is whole and renamed.

A writer removes its part however it ends, except by `kill -9` or a power cut. What those leave behind is cleared away by a later writer: a
part that nobody has written to for an hour has no owner any more. A younger one may have, on another host too, so it is left alone.
"""

import glob
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

_FORGOTTEN_SECONDS = 3600.0


def new_part(place: Path) -> Path:
    """An empty file beside `place`; its usual name, or one of this thread's own where somebody else writes."""
    part = place.with_name(f"{place.name}.part")
    if part.exists():
        clear_forgotten(place.parent, f"{glob.escape(place.name)}*.part")
    if part.exists():
        part = place.with_name(f"{place.name}.{os.getpid()}-{threading.get_ident()}.part")
    part.touch(exist_ok=False)
    return part


def clear_forgotten(folder: Path, pattern: str = "*.part") -> None:
    """Removes parts in `folder` that nobody has written to for an hour."""
    for part in folder.glob(pattern):
        with suppress(OSError):  # another process clears, too
            if time.time() - part.stat().st_mtime > _FORGOTTEN_SECONDS:
                part.unlink()
