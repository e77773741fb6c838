"""Who and where we are: one frozen value, read once from whatever launcher started this process.

Words (Horovod's)::

    rank        number of this process among all                 0 .. size-1 local_rank  number
    among the processes of its host           0 .. local_size-1 cross_rank  number of its host among
    the hosts that have a process with this local_rank   0 .. cross_size-1

    hosts a:1, b:2     rank 0 = a 0/1 cross 0/2      rank 1 = b 0/2 cross 1/2      rank 2 = b 1/2
    cross 0/1

Every launcher tells its processes their place in environment variables of its own; the table
`LAUNCHERS` is all we know of them, in the order in which they are believed. Launchers nest, so
several may speak at once:

* Claims that agree are one: of those that tell which ranks share a host, the first is taken (a
  plain PMI tells only rank and size).
* Claims of one process only contradict nothing: in `srun -n 1 bash` followed by `mpirun -np 2`,
  Slurm says 1 process and Open MPI says 2; the inner one counts.
* An outer launcher that puts one task on each host (`srun --ntasks-per-node 1 torchrun ...`, the
  daemons that mpirun starts through Slurm) speaks of those tasks; the inner one counts.
* Two that both claim several processes and disagree are an error that names the variables.
  `ALLSTEP_LAUNCHER`, or `--launcher`, decides it: a name of the table, or `none` for a world of
  one.

Nobody else in allstep reads RANK and the like.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from allstep.errors import WorldError, cut, did_you_mean

Environment = Mapping[str, str]


class Launcher(NamedTuple):
    """Under which names a launcher tells its processes their place.

    The first variable of a tuple that is set counts.
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    cross_rank: tuple[str, ...] = ()
    cross_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()  # number or name of the host as the launcher sees it
    host: tuple[str, ...] = ()  # name of the host
    job: tuple[str, ...] = ()  # together these name the running job on this machine
    needs: tuple[str, ...] = ()  # without these the other variables mean something else


LAUNCHERS: dict[str, Launcher] = {
    launcher.name: launcher
    for launcher in (
        Launcher(
            "allstep",
            rank=("ALLSTEP_RANK",),
            size=("ALLSTEP_SIZE",),
            local_rank=("ALLSTEP_LOCAL_RANK",),
            local_size=("ALLSTEP_LOCAL_SIZE",),
            cross_rank=("ALLSTEP_CROSS_RANK",),
            cross_size=("ALLSTEP_CROSS_SIZE",),
            node=("ALLSTEP_HOST",),
            host=("ALLSTEP_HOST",),
        ),
        Launcher(
            "horovod",
            rank=("HOROVOD_RANK",),
            size=("HOROVOD_SIZE",),
            local_rank=("HOROVOD_LOCAL_RANK",),
            local_size=("HOROVOD_LOCAL_SIZE",),
            cross_rank=("HOROVOD_CROSS_RANK",),
            cross_size=("HOROVOD_CROSS_SIZE",),
            node=("HOROVOD_HOSTNAME",),
            host=("HOROVOD_HOSTNAME",),
            job=("HOROVOD_GLOO_RENDEZVOUS_PORT",),
        ),
        Launcher(
            "torchrun",
            rank=("RANK",),
            size=("WORLD_SIZE",),
            local_rank=("LOCAL_RANK",),
            local_size=("LOCAL_WORLD_SIZE",),
            node=("GROUP_RANK",),
        ),
        Launcher(
            "openmpi",
            rank=("OMPI_COMM_WORLD_RANK",),
            size=("OMPI_COMM_WORLD_SIZE",),
            local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
            local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
            job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        ),
        Launcher(  # MPICH, Intel MPI and MVAPICH: Hydra's variables, or those of a plain PMI
            "mpich",
            rank=("PMI_RANK", "MV2_COMM_WORLD_RANK"),
            size=("PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
            local_rank=("MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
            local_size=("MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ),
        # a step: the batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but is one process
        Launcher(
            "slurm",
            rank=("SLURM_PROCID",),
            size=("SLURM_STEP_NUM_TASKS",),
            local_rank=("SLURM_LOCALID",),
            node=("SLURM_NODEID",),
            host=("SLURMD_NODENAME",),
            job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
            needs=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        ),
        Launcher(  # HPE Cray's mpiexec
            "pals",
            rank=("PALS_RANKID",),
            size=("PALS_SIZE", "PMI_SIZE"),
            local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
            local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
            node=("PALS_NODEID",),
            job=("PALS_APID",),
        ),
        Launcher(  # IBM's jsrun
            "lsf",
            rank=("JSM_NAMESPACE_RANK",),
            size=("JSM_NAMESPACE_SIZE",),
            local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
            local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
            job=("LSB_JOBID", "PMIX_NAMESPACE"),
        ),
    )
}
NONE = "none"


@dataclass(frozen=True)
class World:
    """The place of this process.

    `launcher` is a name of `LAUNCHERS`, or "none" for a process that nobody launched.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    launcher: str

    @property
    def generation(self) -> int:
        """How often the ranks of this run have formed a new world; 0 for the first (D14).

        Always 0 so far. Not a field yet: `run.jsonl` records the fields, and the environment, which
        is written once per process, could not carry it.
        """
        return 0

    @classmethod
    def detect(cls, launcher: str | None = None, env: Environment | None = None) -> "World":
        """Read our place from the environment. `launcher` (else ALLSTEP_LAUNCHER) says whom to
        believe.

        Where a launcher does not tell about hosts, cross_rank and cross_size suppose equal hosts,
        filled one after the other; `allstep.init()` asks all ranks and returns the exact ones.
        """
        env = os.environ if env is None else env
        forced = launcher or env.get("ALLSTEP_LAUNCHER")
        if forced and forced != NONE and forced not in LAUNCHERS:
            raise WorldError(
                f"no launcher is called {forced!r} (--launcher, ALLSTEP_LAUNCHER);"
                f" {did_you_mean(forced, [*LAUNCHERS, NONE])}"
            )
        if forced == NONE:
            return cls.alone()
        if forced:
            claim = _claim(LAUNCHERS[forced], env)
            if claim is None:
                raise WorldError(
                    f"the launcher should be {forced}, but {LAUNCHERS[forced].rank[0]} is not set"
                )
            return claim.world
        claims = [
            claim for known in LAUNCHERS.values() if (claim := _claim(known, env)) is not None
        ]
        if not claims:
            _refuse_rank_without_size(env)
            return cls.alone()
        return _believe(claims).world

    @classmethod
    def alone(cls) -> "World":
        """A world of one process."""
        return cls(0, 1, 0, 1, 0, 1, socket.gethostname(), NONE)

    def to_env(self) -> dict[str, str]:
        """The variables by which `detect` finds this world again, and torch's names for the same
        facts."""
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
        }


def places(hosts: Sequence[str], launcher: str = "allstep") -> list[World]:
    """The world of every rank when rank i runs on hosts[i]."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    worlds = []
    for rank, host in enumerate(hosts):
        local_rank = members[host].index(rank)
        same = [name for name, ranks in members.items() if len(ranks) > local_rank]
        worlds.append(
            World(
                rank,
                len(hosts),
                local_rank,
                len(members[host]),
                same.index(host),
                len(same),
                host,
                launcher,
            )
        )
    return worlds


def node_of(world: World, env: Environment | None = None) -> str:
    """What tells this host from the others in the launcher's eyes.

    The launcher's own number or name for it where there is one; else the kernel's name and boot,
    which no two machines share.
    """
    env = os.environ if env is None else env
    if world.launcher in LAUNCHERS:
        name = _first(LAUNCHERS[world.launcher].node, env)
        if name:
            return f"{name}={env[name]}"
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def local_variables(world: World, env: Environment | None = None) -> str:
    """How the launcher told us our place on this host, for error messages; empty when it did not."""
    env = os.environ if env is None else env
    known = LAUNCHERS.get(world.launcher)
    names = [_first(known.local_rank, env), _first(known.local_size, env)] if known else []
    return ", ".join(f"{name}={env[name]}" for name in names if name) if all(names) else ""


def job_of(world: World, env: Environment | None = None) -> str:
    """A name for the running job that all its processes on this host share, and no other job here."""
    env = os.environ if env is None else env
    known = LAUNCHERS[world.launcher]
    parts = [env[name] for name in known.job if env.get(name)]
    if not parts:
        parts = [f"parent{os.getppid()}"]
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([known.name, *parts]))


# Nodes of a job; the largest clusters have some ten thousand.
_MAX_NODES = 1 << 20


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` as [2, 2, 2, 1]."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", item.strip())
        if match is None:
            raise WorldError(f"SLURM_STEP_TASKS_PER_NODE={cut(repr(text))} is not like '2(x3),1'")
        nodes = int(match[2] or 1)
        if len(counts) + nodes > _MAX_NODES:
            raise WorldError(
                f"SLURM_STEP_TASKS_PER_NODE={cut(repr(text))} has more than {_MAX_NODES:,} nodes"
            )
        counts += [int(match[1])] * nodes
    return counts


class _Claim(NamedTuple):
    """What one launcher says, and the words in which it says it."""

    world: World
    said: str  # for errors: "SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4"
    knows_hosts: bool  # it told the place among the ranks of the host


def _first(names: tuple[str, ...], env: Environment) -> str | None:
    return next((name for name in names if env.get(name)), None)


def _claim(known: Launcher, env: Environment) -> _Claim | None:
    rank_name = _first(known.rank, env)
    if rank_name is None or any(not env.get(name) for name in known.needs):
        return None
    env = _with_size(known, env)
    size_name = _first(known.size, env)
    if size_name is None:
        raise WorldError(
            f"{rank_name}={env[rank_name]} is set but {known.size[0]} is not: set both, or unset"
            f" {rank_name}, or say ALLSTEP_LAUNCHER={NONE} for a world of one process"
        )
    rank, size = _number(rank_name, env), _number(size_name, env)
    said = f"{rank_name}={rank}, {size_name}={size}"
    if rank >= size:
        raise WorldError(f"rank and size contradict each other: {said} (ranks count from 0)")
    local_rank, local_size = _local(known, env, rank, size, said)
    cross_rank, cross_size = _cross(known, env, rank, size, local_size)
    host = env[name] if (name := _first(known.host, env)) else socket.gethostname()
    knows_hosts = _first(known.local_rank, env) is not None
    return _Claim(
        World(rank, size, local_rank, local_size, cross_rank, cross_size, host, known.name),
        said,
        knows_hosts,
    )


def _with_size(known: Launcher, env: Environment) -> Environment:
    """PALS over PMIx says how many ranks are on a host, and PBS lists the hosts, but nobody
    multiplies them."""
    if (
        known.name != "pals"
        or _first(known.size, env)
        or not env.get("PBS_NODEFILE")
        or not env.get("PALS_LOCAL_SIZE")
    ):
        return env
    try:
        with open(env["PBS_NODEFILE"]) as file:  # noqa: PTH123
            num_hosts = len(set(file.read().split()))
    except OSError:
        return env
    return {**env, "PALS_SIZE": str(num_hosts * _number("PALS_LOCAL_SIZE", env))}


def _local(known: Launcher, env: Environment, rank: int, size: int, said: str) -> tuple[int, int]:
    """local_rank and local_size; a launcher that does not tell is taken to use one host."""
    rank_name = _first(known.local_rank, env)
    size_name = _first(known.local_size, env)
    if known.name == "slurm" and env.get("SLURM_STEP_TASKS_PER_NODE"):
        size_name = "SLURM_STEP_TASKS_PER_NODE"
        counts = tasks_per_node(env[size_name])
        node = _number("SLURM_NODEID", env) if env.get("SLURM_NODEID") else 0
        if node >= len(counts):
            raise WorldError(
                f"SLURM_NODEID={node} is not below the {len(counts)} nodes of"
                f" {size_name}={env[size_name]}"
            )
        local_size = counts[node]
    else:
        local_size = _number(size_name, env) if size_name else size
    local_rank = _number(rank_name, env) if rank_name else rank % local_size
    if local_rank >= local_size or local_size > size:
        told = ", ".join(f"{name}={env[name]}" for name in (rank_name, size_name) if name)
        raise WorldError(f"the local rank and sizes contradict each other: {told} with {said}")
    return local_rank, local_size


def _cross(
    known: Launcher, env: Environment, rank: int, size: int, local_size: int
) -> tuple[int, int]:
    rank_name, size_name = _first(known.cross_rank, env), _first(known.cross_size, env)
    if rank_name and size_name:
        return _number(rank_name, env), _number(size_name, env)
    node = _first(known.node, env)
    count = -(-size // local_size)
    if node and env[node].isdigit():
        return int(env[node]), max(count, int(env[node]) + 1)
    return rank // local_size, count


def _number(name: str, env: Environment) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = -1
    if value < 0:
        raise WorldError(f"{name}={env[name]!r} is not a whole number from 0")
    return value


def _believe(claims: list[_Claim]) -> _Claim:
    """The claim that counts. `claims` stand in the order of the table."""
    several = [claim for claim in claims if claim.world.size > 1]
    if not several:
        return claims[0]
    inner = [
        claim
        for claim in several
        if not any(_is_outside(claim, other, several) for other in several)
    ]
    if len({(claim.world.rank, claim.world.size) for claim in inner}) > 1:
        stories = "; ".join(f"{claim.world.launcher} says {claim.said}" for claim in inner)
        raise WorldError(
            f"two launchers contradict each other: {stories}. Unset the variables of the one that"
            " is not meant, or name the other with --launcher or ALLSTEP_LAUNCHER"
            f" ({', '.join(claim.world.launcher for claim in inner)})"
        )
    return next((claim for claim in inner if claim.knows_hosts), inner[0])


def _is_outside(claim: _Claim, other: _Claim, order: list[_Claim]) -> bool:
    """Whether `claim` speaks of one task per host, in each of which `other`'s launcher was started."""
    if claim.world.local_size > 1 or claim is other:
        return False
    if claim.world.size == other.world.size:
        return other.world.local_size == 1 and order.index(other) < order.index(claim)
    return claim.world.size < other.world.size


def _refuse_rank_without_size(env: Environment) -> None:
    """PMIx tells its processes their rank but not how many they are; whoever started it must."""
    if env.get("PMIX_RANK"):
        raise WorldError(
            f"PMIX_RANK={env['PMIX_RANK']} is set but nothing says how many ranks there are: start"
            " with mpirun, srun or allstep run, or set RANK and WORLD_SIZE, or say"
            f" ALLSTEP_LAUNCHER={NONE} for a world of one process"
        )
