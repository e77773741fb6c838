"""The folder for what was downloaded, unpacked or indexed:

`ALLSTEP_CACHE`, else the user's cache folder.
"""

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """Where downloads are kept."""
    asked = os.environ.get("ALLSTEP_CACHE")
    return Path(asked) if asked else user_cache_path("allstep")
