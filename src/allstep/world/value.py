"""The world as one value: rank, size, local and cross ranks, host and launcher of a process."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from allstep.world.detect import detect_place
from allstep.world.launcher_variables import NONE, Environment

_GENERATION = "ALLSTEP_GENERATION"


@dataclass(frozen=True)
class World:
    """The place of a process among all processes of a run, in Horovod's terms.

    rank, size: number of this process among all, and their number. local_rank, local_size: the same
    among the processes of its host. cross_rank, cross_size: number of its host among the hosts that
    have a process with this local_rank, and their number. host: name of the host. launcher: a name
    of `LAUNCHERS`, or "none" for a process that no launcher started. generation: how often the
    workers of this run have formed a new world; 0 for the first (D14).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    launcher: str
    generation: int = field(default=0, repr=False)

    @classmethod
    def detect(cls, launcher: str | None = None, env: Environment | None = None) -> "World":
        """Read the world of this process from the environment.

        launcher: the launcher to trust (default: ALLSTEP_LAUNCHER, else detect). env: the
        environment (default: os.environ). Raises WorldError for variables that contradict each
        other.

        Where a launcher does not report hosts, cross_rank and cross_size assume equal hosts, filled
        one after the other; `allstep.init()` asks all ranks and returns the exact values.
        """
        env = os.environ if env is None else env
        place = detect_place(launcher, env)
        if place is None:
            return cls.alone()
        is_ours = place.launcher == "allstep"
        return cls(*place, generation=int(env.get(_GENERATION, "0")) if is_ours else 0)

    @classmethod
    def alone(cls) -> "World":
        """Return a world of one process."""
        return cls(0, 1, 0, 1, 0, 1, socket.gethostname(), NONE)

    def to_env(self) -> dict[str, str]:
        """Return the variables from which `detect` reads this world, and torch's equivalents."""
        return {
            "ALLSTEP_RANK": str(self.rank),
            "ALLSTEP_SIZE": str(self.size),
            "ALLSTEP_LOCAL_RANK": str(self.local_rank),
            "ALLSTEP_LOCAL_SIZE": str(self.local_size),
            "ALLSTEP_CROSS_RANK": str(self.cross_rank),
            "ALLSTEP_CROSS_SIZE": str(self.cross_size),
            "ALLSTEP_HOST": self.host,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            **({_GENERATION: str(self.generation)} if self.generation else {}),
        }

    def to_horovod_env(self) -> dict[str, str]:
        """Return the place as Horovod's variables, which its scripts read."""
        return {
            "HOROVOD_HOSTNAME": self.host,
            "HOROVOD_RANK": str(self.rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(self.local_rank),
            "HOROVOD_LOCAL_SIZE": str(self.local_size),
            "HOROVOD_CROSS_RANK": str(self.cross_rank),
            "HOROVOD_CROSS_SIZE": str(self.cross_size),
        }


def places(hosts: Sequence[str], launcher: str = "allstep", generation: int = 0) -> list[World]:
    """Return the worlds of all ranks if rank i runs on hosts[i]."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    worlds = []
    for rank, host in enumerate(hosts):
        local_rank = members[host].index(rank)
        same = [name for name, ranks in members.items() if len(ranks) > local_rank]
        local, cross = (local_rank, len(members[host])), (same.index(host), len(same))
        worlds.append(World(rank, len(hosts), *local, *cross, host, launcher, generation))
    return worlds
