"""Predict what a run would use: workers, threads, backend, and the store of the rendezvous."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from allstep.doctor.torch_probe import Engine
from allstep.launch import Host
from allstep.machine import allowed_cores, threads_by_user
from allstep.world import NONE, World


@dataclass(frozen=True)
class Choice:
    """What a run that is started now on this machine would use."""

    command: str
    """Command that the prediction is for."""
    workers: int
    """Number of workers on all hosts."""
    threads: int
    """Threads of each worker."""
    backend: str
    """Backend of the collectives, as text."""
    meeting: str
    """Store of the rendezvous, as text."""


def choose(world: World | None, engine: Engine, hosts: Sequence[Host]) -> Choice:
    """Return what a run would use.

    With `hosts` the run is `allstep run` on them; else, under a launcher, a script in this world;
    else `allstep train`. `engine` is what torch reports about backends and devices.
    """
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
    """Return the default number of workers of `allstep train`."""
    from allstep.train.config.num_workers import default_num_workers
    from allstep.train.config.recipes import DEFAULT, RECIPES

    return default_num_workers(RECIPES[DEFAULT]())


def threads(local_size: int) -> int:
    """Return the threads of each worker: OMP_NUM_THREADS if set, else a fair share of the cores."""
    return user_threads() or max(1, allowed_cores() // max(1, local_size))


def user_threads() -> int | None:
    """Return the user's OMP_NUM_THREADS; None if it is not set or not a number above 0.

    Of a list (for nested loops) the first number counts.
    """
    first = (threads_by_user(os.environ) or "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def _backend(engine: Engine, local_size: int) -> str:
    """Return the backend that `allstep.init()` would choose, as text."""
    num_gpus = sum(device.startswith("cuda") for device in engine.devices)
    if num_gpus and num_gpus >= local_size and engine.backends.get("nccl"):
        return f"{_CPU_BACKEND}, nccl for GPU tensors"
    return _CPU_BACKEND


_CPU_BACKEND = "allstep: shared memory on a host, gloo between hosts"
_LAUNCHERS_STORE = "in the launcher's own store, which outlives every rank"


def _meeting(world: World) -> str:
    """Return where `allstep.comm.join.rendezvous` would find the store, as text."""
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
    return "in a store of rank 0, whose address mpi4py broadcasts"
