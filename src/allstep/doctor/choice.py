"""What allstep will use: how many workers, threads each, which backend, and how the ranks will find
each other."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.doctor.torch_probe import Engine
from allstep.launch import Host
from allstep.machine import allowed_cores, threads_by_user
from allstep.world import NONE, World


@dataclass(frozen=True)
class Choice:
    """What a run started now, here, would be."""

    command: str
    workers: int
    threads: int
    backend: str
    meeting: str


def choose(world: World | None, engine: Engine, hosts: Sequence[Host]) -> Choice:
    """For this process's world; outside one, for `allstep train`, or for `allstep run` on `hosts`."""
    if hosts:
        slots = max(host.slots for host in hosts)
        command = f"allstep run -H {','.join(f'{host.name}:{host.slots}' for host in hosts)}"
        return Choice(
            command,
            sum(host.slots for host in hosts),
            threads(slots),
            _backend(engine, slots),
            _LAUNCHERS_STORE,
        )
    if world is None or world.launcher == NONE:
        workers = _workers_of_train()
        return Choice(
            "allstep train", workers, threads(workers), _backend(engine, workers), _LAUNCHERS_STORE
        )
    return Choice(
        f"a script under {world.launcher}",
        world.size,
        threads(world.local_size),
        _backend(engine, world.local_size),
        _meeting(world),
    )


def _workers_of_train() -> int:
    from allstep.train.config.num_workers import default_num_workers
    from allstep.train.config.recipes import DEFAULT, RECIPES

    return default_num_workers(RECIPES[DEFAULT]())


def threads(local_size: int) -> int:
    """Of each worker: what the user said, else a fair share of the cores."""
    return user_threads() or max(1, allowed_cores() // max(1, local_size))


def user_threads() -> int | None:
    """The user's OMP_NUM_THREADS; None when it is not set or no number above 0.

    Of a list (nested loops) the first counts.
    """
    first = (threads_by_user(os.environ) or "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def _backend(engine: Engine, local_size: int) -> str:
    """As `allstep.init()` chooses."""
    num_gpus = sum(device.startswith("cuda") for device in engine.devices)
    if num_gpus and num_gpus >= local_size and engine.backends.get("nccl"):
        return f"{_CPU_BACKEND}, nccl for GPU tensors"
    return _CPU_BACKEND


_CPU_BACKEND = "allstep: shared memory on a host, gloo between hosts"
_LAUNCHERS_STORE = "in the launcher's own store, which outlives every rank"


def _meeting(world: World) -> str:
    """As `allstep.comm.join.rendezvous` finds the store."""
    address = os.environ.get("MASTER_ADDR")
    if world.launcher == "allstep":
        return _LAUNCHERS_STORE
    if world.launcher == "torchrun":
        return f"in torchrun's store at {address}:{os.environ.get('MASTER_PORT')}"
    if world.local_size == world.size:
        return "in a store of rank 0, found by a file in the user's run-time folder"
    if address:
        return f"in a store of rank 0 at {address} (MASTER_ADDR)"
    if world.launcher == "slurm":
        return "in a store of rank 0 at the first host of the Slurm step"
    return "in a store of rank 0, told over mpi4py"
