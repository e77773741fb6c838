"""The environment of a worker whose script was written for Horovod.

Every worker has Horovod's variables. With `--as-horovod`, `import horovod` also works: `FOLDER`
holds a package `horovod` of thin modules that re-export allstep's objects, and `bin/horovodrun`.
Put first on PYTHONPATH it serves `import horovod.torch`; an installed Horovod is shadowed for that
run and otherwise not touched.
"""

from collections.abc import Mapping
from pathlib import Path

from allstep.launch.search_path import with_first

# The version of Horovod whose API allstep implements.
API_VERSION = "0.28.1"
FOLDER = Path(__file__).parent.parent / "horovod_path"


def host_variables(store: tuple[str, int], env: Mapping[str, str]) -> dict[str, str]:
    """Return Horovod's variables that all workers of a host share: the store and the interface."""
    interface = env.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": store[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store[1]),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
    }


def with_horovod(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with `FOLDER` on PYTHONPATH, so that `import horovod` finds allstep."""
    return with_first(FOLDER, env)
