"""`--replace-gloo`: the environment in which Gloo is replaced by backend "allstep".

`FOLDER` goes first on the workers' PYTHONPATH, here and, with the rest of the environment, on other
hosts. What happens then is described in the folder's one module.
"""

from collections.abc import Mapping
from pathlib import Path

from allstep.errors import ConfigError
from allstep.launch.search_path import with_first

FOLDER = Path(__file__).parent.parent / "gloo_path"
LINE = '--replace-gloo: for gloo, or no backend on a CPU, torch.distributed programs get "allstep"'
_PLUGINS = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def with_gloo_replaced(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment whose programs get backend "allstep" for Gloo."""
    if env.get(_PLUGINS, "1") != "1":
        raise ConfigError(
            f"--replace-gloo needs torch's plugins, but {_PLUGINS}={env[_PLUGINS]} turns them off:"
            " unset it"
        )
    return with_first(FOLDER, env)
