"""The backend "allstep" of torch.distributed: creates the groups for torch.

`init_process_group("allstep")` and `new_group` call it. torch uses our object for the whole group,
whatever else the backend string contains, so the group brings its own NCCL for CUDA tensors if
torch sees a GPU. Both inner backends are registered inside the group, for callers in C++ that
bypass Python.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, _DistributedBackendOptions

from allstep.comm.group.build_memory import (
    Options,
    WorldOptions,
    exchange_cards,
    join_hosts,
    world_cards,
)
from allstep.comm.group.counted_group import kind_of_default
from allstep.comm.group.named_group import NAME
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.health.cut_connections import begin_faults
from allstep.comm.health.generation_end import ended
from allstep.comm.health.guard import Guard
from allstep.comm.health.joined_processes import lives_in
from allstep.comm.join.barrier import host_name, leave_card
from allstep.comm.join.launcher_store import reason_of_end
from allstep.comm.network.gloo import GlooTransport
from allstep.comm.network.gloo_on_demand import GlooOnDemand
from allstep.comm.network.guarded_gloo import connected
from allstep.comm.timeline import timeline


def register() -> None:
    """Register the backend with torch."""
    dist.Backend.register_backend(
        NAME, _create_for_torch, extended_api=True, devices=["cpu", "cuda"]
    )


def _create_for_torch(
    options: _DistributedBackendOptions, backend_options: Any = None
) -> AllstepGroup:
    """Create a group; torch calls this for the default group and for every new one."""
    if dist.is_initialized():
        return create(options, backend_options)
    if not timeline.is_running():
        timeline.begin_if_asked(options.store, options.group_rank, options.group_size)
    begin_faults(options.group_rank, options.group_size)
    return create(options, backend_options, kind_of_default())


def create(
    options: _DistributedBackendOptions,
    backend_options: Any = None,
    kind: type[AllstepGroup] = AllstepGroup,
) -> AllstepGroup:
    """Create one group, on all its ranks at once. kind: its class."""
    store, rank, size, timeout = _basics(options)
    chosen = (
        backend_options if isinstance(backend_options, Options) else Options(nccl=backend_options)
    )
    names = options.global_ranks_in_group
    guard = Guard(
        PrefixStore("guard/", store), rank, size, timeout.total_seconds(), names, host_name()
    )
    # Once the guard is known to the thread that fails all groups at the end of a generation.
    if reason := reason_of_end(store):
        guard.fail_alone(ended(reason, guard.names[rank]))
    try:
        return _create(options, chosen, kind, guard)
    except BaseException:
        # A rank was lost while the group was being formed.
        guard.close(guard)
        raise


def _create(
    options: _DistributedBackendOptions,
    chosen: Options,
    kind: type[AllstepGroup],
    guard: Guard,
) -> AllstepGroup:
    store, rank, size, timeout = _basics(options)
    guard.watch_processes(lives_in(store, options.global_ranks_in_group))
    host_store = PrefixStore("host/", store)
    # Before Gloo connects: inside Gloo a rank that is gone is noticed only after its timeout.
    cards = (
        world_cards(chosen)
        if isinstance(chosen, WorldOptions)
        else exchange_cards(host_store, rank, size, chosen, guard)
    )
    group = kind(store, rank, size, timeout, guard)
    connect = partial(_connect, group, options, guard)
    if isinstance(chosen, WorldOptions) and len({card["node"] for card in cards}) == 1:
        local = join_hosts(host_store, rank, cards, timeout, chosen, guard)
        group.local = local
        group.far = GlooOnDemand(connect, guard, local.flags) if local is not None else connect()
    else:
        group.far = connect()
        group.local = join_hosts(host_store, rank, cards, timeout, chosen, guard)
    if torch.cuda.is_available() and dist.is_nccl_available():
        group.nccl = _nccl(options, chosen.nccl)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, group.nccl)
    group._set_group_name(options.group_id)
    if not isinstance(chosen, WorldOptions):
        leave_card(store, rank)
    return group


def _connect(
    group: AllstepGroup, options: _DistributedBackendOptions, guard: Guard
) -> GlooTransport:
    """Connect the group over Gloo, on all ranks at once."""
    store, rank, size, timeout = _basics(options)
    far = connected(PrefixStore("gloo/", store), rank, size, timeout, guard)
    _copy_names(far.gloo.options, options)
    far.gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, far.gloo)
    return far


def _basics(options: _DistributedBackendOptions) -> tuple[Store, int, int, timedelta]:
    return options.store, options.group_rank, options.group_size, options.timeout


def create_apart(
    store: Store,
    name: str,
    rank: int,
    ranks: Sequence[int],
    start: float,
    timeout: float,
    chosen: Options | None = None,
) -> AllstepGroup:
    """Create a group that torch does not know of, on all its ranks at once.

    `store` must have no other writer. `rank` is ours in the world, `ranks` are the members in the
    world. `start` and `timeout` are seconds for connecting, and for an operation. `chosen`: the
    options of the group (default: none).
    """
    options = _DistributedBackendOptions()
    options.store = store
    options.group_rank, options.group_size = list(ranks).index(rank), len(ranks)
    options.global_ranks_in_group = list(ranks)
    options.group_id = name
    options.timeout = timedelta(seconds=start)
    group = create(options, chosen)
    group.set_timeout(timedelta(seconds=timeout))
    return group


def _nccl(options: _DistributedBackendOptions, chosen: Any) -> Any:
    """Create the NCCL group for CUDA tensors. Our tests do not run it: no GPU.

    NCCL connects when it is first used, so a group without GPU work pays nothing.
    """
    from torch._C._distributed_c10d import ProcessGroupNCCL

    nccl_options = (
        chosen if isinstance(chosen, ProcessGroupNCCL.Options) else ProcessGroupNCCL.Options()
    )
    nccl_options._timeout = options.timeout
    _copy_names(nccl_options, options)
    nccl = ProcessGroupNCCL(
        PrefixStore("nccl/", options.store), options.group_rank, options.group_size, nccl_options
    )
    nccl._set_sequence_number_for_group()
    return nccl


def _copy_names(to: Any, options: _DistributedBackendOptions) -> None:
    to.global_ranks_in_group = options.global_ranks_in_group
    to.group_name = options.group_id
