"""Detects the launcher of this process and reads rank and size from its variables.

Each launcher whose variables are set makes a claim about the place of this process. The package's
docstring has the rules by which one of several claims is chosen.
"""

import re
import socket
from pathlib import Path
from typing import NamedTuple

from allstep.errors import WorldError, cut, did_you_mean
from allstep.world.launcher_variables import LAUNCHERS, NONE, Environment, Launcher, first_set

_SLURM_TASKS = "SLURM_STEP_TASKS_PER_NODE"
# Upper limit of the nodes of a job; the largest clusters have some ten thousand.
_MAX_NODES = 1 << 20


class Place(NamedTuple):
    """The place of a process, with the fields of `World`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    launcher: str


class _Claim(NamedTuple):
    """The place of this process according to one launcher.

    variables: for errors, such as "SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4". knows_hosts: the
    launcher reports which ranks share a host.
    """

    place: Place
    variables: str
    knows_hosts: bool


def detect_place(launcher: str | None, env: Environment) -> Place | None:
    """Return the place that the environment gives this process; None without a launcher.

    launcher: the one to trust (default: ALLSTEP_LAUNCHER, else detect). Raises WorldError for
    variables that are incomplete or contradict each other.
    """
    forced = launcher or env.get("ALLSTEP_LAUNCHER")
    if forced == NONE:
        return None
    if forced:
        return _place_of(forced, env)
    claims = [claim for known in LAUNCHERS.values() if (claim := _claim(known, env)) is not None]
    if not claims:
        _refuse_rank_without_size(env)
        return None
    return _choose(claims).place


def _place_of(name: str, env: Environment) -> Place:
    """Return the place according to the launcher called `name`; WorldError if it is not there."""
    if name not in LAUNCHERS:
        raise WorldError(
            f"no launcher is called {name!r} (--launcher, ALLSTEP_LAUNCHER);"
            f" {did_you_mean(name, [*LAUNCHERS, NONE])}"
        )
    claim = _claim(LAUNCHERS[name], env)
    if claim is None:
        raise WorldError(f"the launcher should be {name}, but {LAUNCHERS[name].rank[0]} is not set")
    return claim.place


def tasks_per_node(text: str, variable: str = _SLURM_TASKS) -> list[int]:
    """Return the tasks of each node from Slurm's notation: `2(x3),1` as [2, 2, 2, 1].

    variable: its name, for errors.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", item.strip())
        if match is None:
            raise WorldError(f"{variable}={cut(repr(text))} is not like '2(x3),1'")
        nodes = int(match[2] or 1)
        if len(counts) + nodes > _MAX_NODES:
            found = f"{variable}={cut(repr(text))}"
            raise WorldError(f"{found} has more than {_MAX_NODES:,} nodes")
        counts += [int(match[1])] * nodes
    return counts


def _claim(known: Launcher, env: Environment) -> _Claim | None:
    """Return the claim of one launcher; None if it did not start this process."""
    rank_name = first_set(known.rank, env)
    if rank_name is None or any(not env.get(name) for name in known.needs):
        return None
    env = _with_size(known, env)
    size_name = first_set(known.size, env)
    if size_name is None:
        raise WorldError(
            f"{rank_name}={env[rank_name]} is set but {known.size[0]} is not: set both, or unset"
            f" {rank_name}, or set ALLSTEP_LAUNCHER={NONE} for a world of one process"
        )
    rank, size = _number(rank_name, env), _number(size_name, env)
    variables = f"{rank_name}={rank}, {size_name}={size}"
    if rank >= size:
        raise WorldError(f"rank and size contradict each other: {variables} (ranks count from 0)")
    local = _local(known, env, rank, size, variables)
    cross = _cross(known, env, rank, size, local_size=local[1])
    host = env[name] if (name := first_set(known.host, env)) else socket.gethostname()
    knows_hosts = first_set(known.local_rank, env) is not None
    return _Claim(Place(rank, size, *local, *cross, host, known.name), variables, knows_hosts)


def _with_size(known: Launcher, env: Environment) -> Environment:
    """Return `env` with the number of ranks where PALS does not set it.

    PALS over PMIx reports the ranks of one host, and PBS lists the hosts; the size is their
    product.
    """
    if (
        known.name != "pals"
        or first_set(known.size, env)
        or not env.get("PBS_NODEFILE")
        or not env.get("PALS_LOCAL_SIZE")
    ):
        return env
    try:
        num_hosts = len(set(Path(env["PBS_NODEFILE"]).read_text().split()))
    except OSError:
        return env
    return {**env, "PALS_SIZE": str(num_hosts * _number("PALS_LOCAL_SIZE", env))}


def _local(
    known: Launcher, env: Environment, rank: int, size: int, variables: str
) -> tuple[int, int]:
    """Return local_rank and local_size; a launcher without these variables is taken as one host.

    variables: rank and size, for errors.
    """
    rank_name = first_set(known.local_rank, env)
    size_name = first_set(known.local_size, env)
    if known.name == "slurm" and env.get(_SLURM_TASKS):
        size_name, local_size = _SLURM_TASKS, _slurm_local_size(env)
    else:
        local_size = _number(size_name, env) if size_name else size
    local_rank = _number(rank_name, env) if rank_name else rank % local_size
    if local_rank >= local_size or local_size > size:
        local = ", ".join(f"{name}={env[name]}" for name in (rank_name, size_name) if name)
        raise WorldError(
            f"the local rank and sizes contradict each other: {local} with {variables}"
        )
    return local_rank, local_size


def _slurm_local_size(env: Environment) -> int:
    """Return the number of this step's tasks on this node."""
    counts = tasks_per_node(env[_SLURM_TASKS])
    node = _number("SLURM_NODEID", env) if env.get("SLURM_NODEID") else 0
    if node >= len(counts):
        raise WorldError(
            f"SLURM_NODEID={node} is not below the {len(counts)} nodes of"
            f" {_SLURM_TASKS}={env[_SLURM_TASKS]}"
        )
    return counts[node]


def _cross(
    known: Launcher, env: Environment, rank: int, size: int, local_size: int
) -> tuple[int, int]:
    """Return cross_rank and cross_size; if they are not set, assume equal hosts filled in order."""
    rank_name, size_name = first_set(known.cross_rank, env), first_set(known.cross_size, env)
    if rank_name and size_name:
        return _number(rank_name, env), _number(size_name, env)
    node = first_set(known.node, env)
    count = -(-size // local_size)
    if node and env[node].isdigit():
        return int(env[node]), max(count, int(env[node]) + 1)
    return rank // local_size, count


def _number(name: str, env: Environment) -> int:
    """Return the value of a variable; WorldError if it is not an integer from 0."""
    try:
        value = int(env[name])
    except ValueError:
        value = -1
    if value < 0:
        raise WorldError(f"{name}={env[name]!r} is not a whole number from 0")
    return value


def _choose(claims: list[_Claim]) -> _Claim:
    """Return the claim that counts. `claims` are in the order of the table."""
    several = [claim for claim in claims if claim.place.size > 1]
    if not several:
        return claims[0]
    inner = [
        claim
        for claim in several
        if not any(_is_outside(claim, other, several) for other in several)
    ]
    if len({(claim.place.rank, claim.place.size) for claim in inner}) > 1:
        found = "; ".join(f"{claim.place.launcher} sets {claim.variables}" for claim in inner)
        raise WorldError(
            f"two launchers contradict each other: {found}. Unset the variables of the wrong one,"
            " or name the other with --launcher or ALLSTEP_LAUNCHER"
            f" ({', '.join(claim.place.launcher for claim in inner)})"
        )
    return next((claim for claim in inner if claim.knows_hosts), inner[0])


def _is_outside(claim: _Claim, other: _Claim, order: list[_Claim]) -> bool:
    """Return whether `claim` is about one task per host, each of which ran `other`'s launcher."""
    if claim.place.local_size > 1 or claim is other:
        return False
    if claim.place.size == other.place.size:
        return other.place.local_size == 1 and order.index(other) < order.index(claim)
    return claim.place.size < other.place.size


def _refuse_rank_without_size(env: Environment) -> None:
    """Raise WorldError if only PMIx is found: it passes the rank to its processes, not the size."""
    if env.get("PMIX_RANK"):
        raise WorldError(
            f"PMIX_RANK={env['PMIX_RANK']} is set but no variable has the number of ranks: start"
            " with mpirun, srun or allstep run, or set RANK and WORLD_SIZE, or set"
            f" ALLSTEP_LAUNCHER={NONE} for a world of one process"
        )
