"""`--replace-gloo`: the environment in which backend "allstep" replaces Gloo.

`FOLDER` goes first on the workers' PYTHONPATH, on this host and, with the rest of the environment,
on the others. The folder's only module describes how the replacement works.
"""

from collections.abc import Mapping
from pathlib import Path

from allstep.errors import ConfigError
from allstep.launch.search_path import with_first

FOLDER = Path(__file__).parent.parent / "gloo_path"
LINE = '--replace-gloo: for gloo, or no backend on a CPU, torch.distributed programs get "allstep"'
_PLUGINS = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def with_gloo_replaced(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with `FOLDER` on PYTHONPATH; ConfigError if it turns torch's plugins off."""
    if env.get(_PLUGINS, "1") != "1":
        raise ConfigError(
            f"--replace-gloo needs torch's plugins, but {_PLUGINS}={env[_PLUGINS]} turns them off:"
            " unset it"
        )
    return with_first(FOLDER, env)
