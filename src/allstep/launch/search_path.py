"""The PYTHONPATH of the workers."""

import os
from collections.abc import Mapping
from pathlib import Path


def with_first(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with `folder` first on PYTHONPATH."""
    rest = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
    return {**env, "PYTHONPATH": os.pathsep.join([str(folder), *rest])}
