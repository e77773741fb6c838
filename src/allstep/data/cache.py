"""The folder for what was downloaded, unpacked or indexed:

`ALLSTEP_CACHE`, else the user's cache folder.
"""

import os
from pathlib import Path

from allstep.files.home import cache_home


def cache_folder() -> Path:
    """Where downloads are kept."""
    asked = os.environ.get("ALLSTEP_CACHE")
    return Path(asked) if asked else cache_home()
