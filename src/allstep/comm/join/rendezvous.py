"""How the ranks find each other: from a world to a store that all its ranks share.

```
started by              the store
no launcher             a dictionary in this process
allstep run             the launcher's (ALLSTEP_STORE, ALLSTEP_TOKEN): it outlives every rank
torchrun                torch's own, by MASTER_ADDR and MASTER_PORT
others, one host        rank 0 serves one on loopback; a file named by the job, in the user's
                        run-time folder, has the port
others, several hosts   rank 0 serves one on all its interfaces. The other ranks connect to
                        MASTER_ADDR if it is set, else to the first host of the Slurm step, else to
                        the address that mpi4py broadcasts; else the error asks for MASTER_ADDR
```

Between several hosts without `allstep run` there is no private way to distribute a secret, so the
token is derived from the job unless the user exports ALLSTEP_TOKEN. A derived token keeps jobs
apart, but does not keep out an attacker on the cluster.
"""

import contextlib
import hashlib
import json
import os
import socket
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
from allstep.comm.join.launcher_store import WireStore
from allstep.comm.join.membership import not_admitted
from allstep.errors import ConfigError, WorldError
from allstep.files.atomic import replace_file
from allstep.files.home import cache_home, private_folder
from allstep.limits import Limits
from allstep.process.liveness import birth
from allstep.wire.handshake import WrongToken
from allstep.wire.keys import HOSTS, TICKET
from allstep.world import NONE, World, job_of, tasks_per_node

_NUM_PORTS = 16


@dataclass
class Rendezvous:
    """A store that all ranks share, and what rank 0 must remove after the ranks have joined."""

    store: Store
    server: wire.Server | None = None
    file: Path | None = None

    def all_joined(self) -> None:
        """Remove the file: every rank is connected, so it is not needed any more."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)
            self.file = None

    def close(self) -> None:
        self.all_joined()
        if isinstance(self.store, WireStore):
            self.store.client.close_all()
        if self.server is not None:
            self.server.close()


def find_store(world: World, limits: Limits) -> Rendezvous:
    """Return the store of this world, according to the table in the module docstring."""
    if world.launcher == NONE:
        return Rendezvous(HashStore())
    if world.launcher == "allstep":
        return Rendezvous(connect_to_launcher(limits))
    if world.launcher == "torchrun":
        return Rendezvous(_torch_store(world, limits))
    if world.local_size == world.size:
        return _by_file(world, limits)
    return _between_hosts(world, limits)


def connect_to_launcher(limits: Limits) -> WireStore:
    """Return the store of the launcher that started this process."""
    return _join(*_launchers_store(), limits, os.environ.get(TICKET, ""))


def _join(
    addresses: list[tuple[str, int]], token: str, limits: Limits, ticket: str = ""
) -> WireStore:
    try:
        client = wire.Client(addresses, token, limits.start, ticket)
    except wire.TicketRefused as refused:
        raise not_admitted(refused) from None
    except (ConnectionError, WrongToken) as error:
        raise WorldError(
            f"cannot join the run: {error}. The run that set the variables of this process has"
            " ended, or its port is not reachable: start with `allstep run`, or unset the"
            " launcher's variables (ALLSTEP_RANK and the others) to run alone"
        ) from error
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
            " check that it runs, and that the port is free and open"
        ) from error
    return found[0]


# One host: a file has the port.


def runtime_folder() -> Path:
    """Return a folder that belongs to the user alone, for files that exist as long as a run.

    In a shared temporary folder another user may have taken the name. Then it is in the user's
    cache folder, which several hosts may share.
    """
    chosen = os.environ.get("XDG_RUNTIME_DIR", "")
    # Path.is_dir would raise where a folder above may not be entered.
    is_folder = os.path.isdir(chosen)  # noqa: PTH112
    if is_folder and os.access(chosen, os.W_OK) and Path(chosen).stat().st_uid == os.getuid():
        return _private(Path(chosen) / "allstep")
    try:
        return _private(Path(tempfile.gettempdir()) / f"allstep-{os.getuid()}")
    except WorldError:
        with contextlib.suppress(WorldError, ConfigError, OSError):
            return _private(cache_home() / f"run-{socket.gethostname()}")
        raise


def _private(folder: Path) -> Path:
    try:
        return private_folder(folder)
    except ConfigError as error:
        raise WorldError(f"{error}, or set XDG_RUNTIME_DIR to a folder of your own") from error


def _by_file(world: World, limits: Limits) -> Rendezvous:
    file = runtime_folder() / f"{job_of(world)}.json"
    if world.rank == 0:
        return _serve_by_file(file, limits)
    note = _read_when_there(file, world, limits)
    return Rendezvous(_join([("127.0.0.1", note["port"])], note["token"], limits))


def _serve_by_file(file: Path, limits: Limits) -> Rendezvous:
    _sweep(file.parent)
    token = wire.new_token()
    server = wire.Server(token)
    note = {"port": server.port, "token": token, "pid": os.getpid(), "born": birth(os.getpid())}
    replace_file(file, json.dumps(note).encode(), 0o600)
    return Rendezvous(_join([("127.0.0.1", server.port)], token, limits), server, file)


def _read_when_there(file: Path, world: World, limits: Limits) -> dict[str, Any]:
    """Return what rank 0 wrote, once a running rank 0 has written it.

    A file that an earlier, killed run left does not count.
    """
    end = time.monotonic() + limits.start
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            note: dict[str, Any] = json.loads(file.read_text())
            if birth(note["pid"]) == note["born"]:
                return note
        time.sleep(0.01)
    raise WorldError(
        f"rank {world.rank} on {world.host} waited {limits.start:.0f} s, but rank 0 did not join:"
        f" it wrote no {file}. Check that every rank calls allstep.init(); ALLSTEP_START_TIMEOUT"
        " sets the time limit"
    )


def _sweep(folder: Path) -> None:
    """Remove the files that killed runs left."""
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(file.read_text())
            if birth(note["pid"]) != note["born"]:
                file.unlink()


# Several hosts without `allstep run`.


def _between_hosts(world: World, limits: Limits) -> Rendezvous:
    address = os.environ.get("MASTER_ADDR") or _first_host_of_step(world)
    if address:
        return _at_address(address, world, limits)
    found = _share_by_mpi(world, limits)
    if found is not None:
        return found
    raise WorldError(
        f"{world.size} ranks on several hosts under {world.launcher}, and the host of rank 0 is not"
        " known: set MASTER_ADDR to a name or address of rank 0's host (mpirun -x MASTER_ADDR=...),"
        " or install mpi4py, or start with `allstep run -H`"
    )


def _at_address(address: str, world: World, limits: Limits) -> Rendezvous:
    """Find rank 0 at `address`, or serve the store there as rank 0.

    Rank 0 takes the first free one of a few ports that follow from the job; the others try them
    all.
    """
    token = os.environ.get("ALLSTEP_TOKEN") or _digest("token", job_of(world)).hex()
    ports = [_master_port()] if os.environ.get("MASTER_PORT") else list(_ports(job_of(world)))
    if world.rank == 0:
        server = _serve_at(ports, token)
        return Rendezvous(_join([("127.0.0.1", server.port)], token, limits), server)
    try:
        return Rendezvous(_join([(address, port) for port in ports], token, limits))
    except OSError as error:
        raise WorldError(
            f"rank {world.rank} on {world.host} did not find rank 0 at {address} within"
            f" {limits.start:.0f} s ({error}). Check that rank 0 runs there, or set MASTER_ADDR and"
            " MASTER_PORT to an address and a free port of its host"
        ) from error


def _master_port() -> int:
    """Return the port in MASTER_PORT; WorldError if it is not a port number."""
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
    """Yield ports below the kernel's ephemeral range.

    They depend on the job, so that two jobs on a host rarely collide.
    """
    seed = _digest("ports", job)
    for index in range(_NUM_PORTS):
        yield 15000 + int.from_bytes(seed[2 * index : 2 * index + 2]) % 17000


def hosts_of_step() -> list[str]:
    """Return the hosts of our Slurm step in order; empty if they are not known."""
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


def _share_by_mpi(world: World, limits: Limits) -> Rendezvous | None:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    comm = MPI.COMM_WORLD
    if comm.Get_size() != world.size:
        return None
    server = None
    announcement = None
    if world.rank == 0:
        token = wire.new_token()
        server = wire.Server(token, "")
        announcement = [token, *((address, server.port) for address in machine.outside_addresses())]
    token, *addresses = comm.bcast(announcement)
    return Rendezvous(_join(addresses, token, limits), server)


def expected_host(rank: int, world: World, store: Store) -> str | None:
    """Return the host on which a missing rank should be; None if it is not known."""
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
