"""What a script written for Horovod finds in a worker: Horovod's variables and, when asked for,
Horovod's name to import.

`FOLDER` holds a package `horovod` of thin modules that hand out allstep's own objects, and
`bin/horovodrun`. Put first on PYTHONPATH it answers `import horovod.torch`; a real Horovod in the
environment is shadowed for that run and otherwise left alone.
"""

from collections.abc import Mapping
from pathlib import Path

from allstep.launch.search_path import with_first
from allstep.world import World

API_VERSION = "0.28.1"  # of the Horovod whose API this is
FOLDER = Path(__file__).parent.parent / "horovod_path"


def place_variables(world: World) -> dict[str, str]:
    """The place of one worker, in Horovod's names."""
    return {
        "HOROVOD_HOSTNAME": world.host,
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(world.cross_rank),
        "HOROVOD_CROSS_SIZE": str(world.cross_size),
    }


def host_variables(store: tuple[str, int], env: Mapping[str, str]) -> dict[str, str]:
    """What all workers of a host are told: where the store is, and which interface leads to the
    other hosts."""
    interface = env.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": store[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store[1]),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
    }


def with_horovod(env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which `import horovod` finds allstep."""
    return with_first(FOLDER, env)
