"""How the ranks find each other: from a world to a store that all its ranks share.

================
==========================================================================================================
started by        the store ================
==========================================================================================================
nobody            a dictionary in this process allstep run       the launcher's (ALLSTEP_STORE,
ALLSTEP_TOKEN): it outlives every rank torchrun          torch's own, by MASTER_ADDR and MASTER_PORT
others, one host  rank 0 serves one on loopback; a file named by the job in the user's run-time
folder says where others, several   rank 0 serves one on all its interfaces. The ranks look for it
at MASTER_ADDR where that is set; at the first hosts             host of the Slurm step; or are told
by mpi4py. Else the error asks for MASTER_ADDR ================
==========================================================================================================

Between several hosts without a launcher of ours there is no private way to hand out a secret, so
the token is derived from the job unless the user exports ALLSTEP_TOKEN. It then keeps jobs apart,
but does not keep out somebody on the cluster who means harm.
"""

import contextlib
import hashlib
import json
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import rendezvous

from allstep import machine, wire
from allstep.comm.join.store import WireStore
from allstep.errors import WorldError
from allstep.files.atomic import replace_file
from allstep.limits import Limits
from allstep.process.liveness import birth
from allstep.wire.keys import HOSTS
from allstep.world import NONE, World, job_of, tasks_per_node

_NUM_PORTS = 16


@dataclass
class Meeting:
    """A store that all ranks share, and what rank 0 must take away when the ranks have met or part."""

    store: Store
    server: wire.Server | None = None
    file: Path | None = None

    def all_here(self) -> None:
        """Every rank is connected: the file has done its work."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)
            self.file = None

    def close(self) -> None:
        self.all_here()
        if isinstance(self.store, WireStore):
            self.store.client.close_all()
        if self.server is not None:
            self.server.close()


def find_store(world: World, limits: Limits) -> Meeting:
    """The store of this world, by the table above."""
    if world.launcher == NONE:
        return Meeting(HashStore())
    if world.launcher == "allstep":
        return Meeting(_join(*_launchers_store(), limits))
    if world.launcher == "torchrun":
        return Meeting(_torch_store(world, limits))
    if world.local_size == world.size:
        return _by_file(world, limits)
    return _between_hosts(world, limits)


def _join(addresses: list[tuple[str, int]], token: str, limits: Limits) -> WireStore:
    client = wire.Client(addresses, token, limits.start)
    return WireStore(client, timedelta(seconds=limits.timeout))


def _launchers_store() -> tuple[list[tuple[str, int]], str]:
    missing = [name for name in ("ALLSTEP_STORE", "ALLSTEP_TOKEN") if not os.environ.get(name)]
    if missing:
        raise WorldError(
            f"ALLSTEP_RANK is set but {' and '.join(missing)} is not: start with `allstep run`, or"
            " unset ALLSTEP_RANK"
        )
    try:
        return wire.parse_addresses(os.environ["ALLSTEP_STORE"]), os.environ["ALLSTEP_TOKEN"]
    except ValueError as error:
        raise WorldError(f"ALLSTEP_STORE: {error}") from error


def _torch_store(world: World, limits: Limits) -> Store:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise WorldError(
            f"RANK={world.rank} and WORLD_SIZE={world.size} are set but {' and '.join(missing)} is"
            " not: set them to an address and a free port of rank 0's host, or start with torchrun"
            " or `allstep run`"
        )
    _master_port()
    try:
        found: tuple[Store, int, int] = next(
            rendezvous(
                "env://",
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=limits.start),
            )
        )
    except (dist.DistError, OSError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise WorldError(
            f"rank {world.rank} on {world.host} found no store within {limits.start:.0f} s at"
            f" MASTER_ADDR:MASTER_PORT = {address}: {str(error).splitlines()[0]}. Rank 0 serves it:"
            " is it running, and is the port free and open?"
        ) from error
    return found[0]


# One host: a file says where.


def runtime_folder() -> Path:
    """A folder of the user's own, for files that live as long as a run."""
    chosen = os.environ.get("XDG_RUNTIME_DIR", "")
    # os.path's, since Path's raises where a folder above may not be entered.
    is_folder = os.path.isdir(chosen)  # noqa: PTH112
    if is_folder and os.access(chosen, os.W_OK) and Path(chosen).stat().st_uid == os.getuid():
        folder = Path(chosen) / "allstep"
    else:
        folder = Path(tempfile.gettempdir()) / f"allstep-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise WorldError(
            f"{folder} must be a folder that belongs to you alone (mode 700): remove it, or set"
            " XDG_RUNTIME_DIR"
        )
    return folder


def _by_file(world: World, limits: Limits) -> Meeting:
    file = runtime_folder() / f"{job_of(world)}.json"
    if world.rank == 0:
        return _serve_by_file(file, limits)
    note = _read_when_there(file, world, limits)
    return Meeting(_join([("127.0.0.1", note["port"])], note["token"], limits))


def _serve_by_file(file: Path, limits: Limits) -> Meeting:
    _sweep(file.parent)
    token = wire.new_token()
    server = wire.Server(token)
    note = {"port": server.port, "token": token, "pid": os.getpid(), "born": birth(os.getpid())}
    replace_file(file, json.dumps(note).encode(), 0o600)
    return Meeting(_join([("127.0.0.1", server.port)], token, limits), server, file)


def _read_when_there(file: Path, world: World, limits: Limits) -> dict[str, Any]:
    """What rank 0 wrote, as soon as a living rank 0 has written it; a file that an earlier, killed
    run left does not count."""
    end = time.monotonic() + limits.start
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            note: dict[str, Any] = json.loads(file.read_text())
            if birth(note["pid"]) == note["born"]:
                return note
        time.sleep(0.01)
    raise WorldError(
        f"rank {world.rank} on {world.host} waited {limits.start:.0f} s, but rank 0 did not turn"
        f" up: it left no {file}. Does every rank call allstep.init()? ALLSTEP_START_TIMEOUT sets"
        " the time"
    )


def _sweep(folder: Path) -> None:
    """Remove what killed runs left."""
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(file.read_text())
            if birth(note["pid"]) != note["born"]:
                file.unlink()


# Several hosts without a launcher of ours.


def _between_hosts(world: World, limits: Limits) -> Meeting:
    address = os.environ.get("MASTER_ADDR") or _first_host_of_step(world)
    if address:
        return _at_address(address, world, limits)
    told = _told_by_mpi(world, limits)
    if told is not None:
        return told
    raise WorldError(
        f"{world.size} ranks on several hosts under {world.launcher}, and nothing says where rank 0"
        " is: set MASTER_ADDR to a name or address of rank 0's host (mpirun -x MASTER_ADDR=...),"
        " or install mpi4py, or start with `allstep run -H`"
    )


def _at_address(address: str, world: World, limits: Limits) -> Meeting:
    """Rank 0 takes the first free one of a few ports that follow from the job; the others try them
    all."""
    token = os.environ.get("ALLSTEP_TOKEN") or _digest("token", job_of(world)).hex()
    ports = [_master_port()] if os.environ.get("MASTER_PORT") else list(_ports(job_of(world)))
    if world.rank == 0:
        server = _serve_at(ports, token)
        return Meeting(_join([("127.0.0.1", server.port)], token, limits), server)
    try:
        return Meeting(_join([(address, port) for port in ports], token, limits))
    except OSError as error:
        raise WorldError(
            f"rank {world.rank} on {world.host} did not find rank 0 at {address} within"
            f" {limits.start:.0f} s ({error}). Did rank 0 turn up there? Else set MASTER_ADDR and"
            " MASTER_PORT to an address and a free port of its host"
        ) from error


def _master_port() -> int:
    """The port that the environment names; WorldError when it is none."""
    text = os.environ["MASTER_PORT"]
    port = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
    if not 0 < port < 65536:
        raise WorldError(f"MASTER_PORT={text!a}: expected the number of a port, 1 to 65535")
    return port


def _serve_at(ports: list[int], token: str) -> wire.Server:
    for port in ports:
        with contextlib.suppress(OSError):
            return wire.Server(token, "", port)
    raise WorldError(
        f"rank 0 can listen on none of the ports {', '.join(map(str, ports))}: set MASTER_PORT to a"
        " free one"
    )


def _digest(purpose: str, job: str) -> bytes:
    return hashlib.sha256(f"allstep {purpose} {os.getuid()} {job}".encode()).digest()


def _ports(job: str) -> Iterator[int]:
    """Ports below those that the kernel hands out by itself, spread by the job so that two jobs on
    a host rarely collide."""
    seed = _digest("ports", job)
    for index in range(_NUM_PORTS):
        yield 15000 + int.from_bytes(seed[2 * index : 2 * index + 2]) % 17000


def hosts_of_step() -> list[str]:
    """The hosts of our Slurm step in order; empty when they cannot be told."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    if not nodes:
        return []
    if not any(mark in nodes for mark in "[,"):
        return [nodes]
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def _first_host_of_step(world: World) -> str | None:
    if world.launcher != "slurm":
        return None
    return next(iter(hosts_of_step()), None)


def _told_by_mpi(world: World, limits: Limits) -> Meeting | None:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    comm = MPI.COMM_WORLD
    if comm.Get_size() != world.size:
        return None
    server = None
    letter = None
    if world.rank == 0:
        token = wire.new_token()
        server = wire.Server(token, "")
        letter = [token, *((address, server.port) for address in machine.outside_addresses())]
    token, *addresses = comm.bcast(letter)
    return Meeting(_join(addresses, token, limits), server)


def expected_host(rank: int, world: World, store: Store) -> str | None:
    """On which host a rank that did not turn up should be; None when nobody told us."""
    if world.launcher == "allstep" and store.check([HOSTS]):
        return str(json.loads(store.get(HOSTS))[rank])
    if world.local_size == world.size:
        return world.host
    if world.launcher == "slurm" and os.environ.get("SLURM_STEP_TASKS_PER_NODE"):
        counts = tasks_per_node(os.environ["SLURM_STEP_TASKS_PER_NODE"])
        layout = [
            host for host, count in zip(hosts_of_step(), counts, strict=False) for _ in range(count)
        ]
        return layout[rank] if rank < len(layout) else None
    return None
