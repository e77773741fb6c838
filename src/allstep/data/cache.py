"""The cache folder, which holds downloaded, unpacked and index files."""

import os
from pathlib import Path

from allstep.files.home import cache_home


def cache_folder() -> Path:
    """Return the cache folder: `ALLSTEP_CACHE` if set, else the user's cache folder for allstep."""
    requested = os.environ.get("ALLSTEP_CACHE")
    return Path(requested) if requested else cache_home()
