"""From `init()` to `shutdown()`: the calls that every front-end offers under Horovod's names, with
the same state behind all of them.

`init` starts the engine: the ranks connect, and operations can be matched by name. torch's default
process group is not changed, so a script may create and use it as well. A process without a
launcher is rank 0 of 1, with a real engine.
"""

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from allstep import engine, framework_threads
from allstep.hvd import attached, timeline, use_order, util
from allstep.hvd import process_sets as sets
from allstep.hvd.place import (
    cross_rank,
    cross_size,
    is_initialized,
    local_rank,
    local_size,
    rank,
    running,
    size,
)
from allstep.hvd.process_sets import ProcessSet
from allstep.hvd.timeline import start_timeline, stop_timeline
from allstep.hvd.util import cuda_built, rocm_built, sycl_built

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "sycl_built",
]

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect to the other ranks and start the engine; a second call changes nothing.

    - `comm`: None or [] for all ranks; mpi4py's COMM_WORLD means the same. A list of some ranks is
      ignored with a warning, as in Horovod without MPI: use a process set.
    - `process_sets`: process sets that exist from the start, the same on all ranks; or "dynamic",
      to add and remove them later. Default: none.
    """
    chosen = _chosen(process_sets)
    _refuse_unknown(comm)
    is_new = not is_initialized()
    if is_new:
        _start(chosen)
        # The engine has given torch its share of the cores.
        framework_threads.take(torch.get_num_threads(), speaks=rank() == 0)
    _check(comm)
    sets.register([each for each in chosen if each.process_set_id is None])
    if is_new:
        attached.attach_all()


def shutdown() -> None:
    """Stop the engines of all ranks; a no-op if none runs. `init` may be called again.

    Optimizers may be used again after the next `init`, in the new world. A step in progress is
    dropped: gradients of backward passes since the last step are set to None.
    """
    current = engine.current()
    if current is None or current.is_forked:
        return
    try:
        attached.detach_all()
    finally:
        timeline.forget()
        sets.forget()
        use_order.forget()
        framework_threads.give_back()
        current.shutdown()


def is_homogeneous() -> bool:
    """Return whether every host has the same number of processes."""
    return len(set(Counter(running().hosts).values())) == 1


def mpi_enabled() -> bool:
    """Return False: MPI may launch the ranks, but transports no data."""
    return False


def mpi_threads_supported() -> bool:
    """Raise ValueError, since MPI is not in use. Horovod: whether threads may call MPI."""
    running()
    raise ValueError(
        "mpi_threads_supported(): MPI is not enabled; the ranks communicate through shared"
        " memory, Gloo and NCCL"
    )


def gloo_enabled() -> bool:
    """Return True: Horovod's name for a run without MPI."""
    return True


def mpi_built() -> bool:
    """Return False: see `mpi_enabled`."""
    return util.mpi_built()


def gloo_built() -> bool:
    """Return whether torch has Gloo."""
    return util.gloo_built()


def nccl_built() -> int:
    """Return the version of torch's NCCL as one number, 0 without NCCL."""
    return util.nccl_built()


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return util.ddl_built()


def ccl_built() -> bool:
    """Return False: oneCCL is not used."""
    return util.ccl_built()


def _chosen(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    """Return the static sets.

    For "dynamic", set HOROVOD_DYNAMIC_PROCESS_SETS for this process and its children.
    """
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f'init(process_sets={process_sets!r}): expected a list of ProcessSet, or "dynamic"'
            )
        os.environ[_DYNAMIC] = "1"
        return []
    for each in process_sets:
        if not isinstance(each, ProcessSet):
            raise ValueError(
                f"init(process_sets=...): {each!r} is not a ProcessSet; write"
                f" hvd.ProcessSet({each!r})"
            )
    return list(process_sets)


def _start(chosen: Sequence[ProcessSet]) -> None:
    try:
        engine.start([each.ranks for each in chosen], util.env_flag(_DYNAMIC), timeline.hooks_for)
    except ValueError as error:
        raise ValueError(f"Horovod initialization failed: {error}") from error


def _refuse_unknown(comm: Any) -> None:
    if comm is not None and not isinstance(comm, Sequence) and not _is_communicator(comm):
        raise ValueError(
            f"init(comm={comm!r}): expected None, a list of ranks or an mpi4py communicator"
        )


def _is_communicator(comm: Any) -> bool:
    return hasattr(comm, "Get_rank") and hasattr(comm, "Get_size")


def _check(comm: Any) -> None:
    """Raise or warn if `comm` is not the whole world."""
    if _is_communicator(comm):
        if (comm.Get_rank(), comm.Get_size()) != (rank(), size()):
            raise ValueError(
                f"init(comm=...): this communicator has rank {comm.Get_rank()} of"
                f" {comm.Get_size()}, the world has {rank()} of {size()}; use hvd.ProcessSet for a"
                " subset of the ranks"
            )
    elif comm and sorted(comm) != list(range(size())):
        warnings.warn(
            f"init(comm={list(comm)}) is ignored: the world is all {size()} ranks; use"
            f" hvd.ProcessSet({list(comm)}) for a subset of them",
            stacklevel=3,
        )
