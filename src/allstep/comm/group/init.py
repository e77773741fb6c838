"""`allstep.init()`: from a started process to a rank of a process group.

Five steps: detect our rank, find the store that all ranks share, wait there for the other ranks
(`joined`), set threads and GPU, and create torch's default process group. A single process is a
real group, too.

The state of a process is one object, a `Session`. It can be closed and opened again. In an elastic
run it is then in the next world, with another rank and other members (`rejoin`). If that world ends
while it is being formed, the session joins the one after it.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from allstep.comm.group.backend import create_apart
from allstep.comm.group.joined import Joined, join_ranks
from allstep.comm.group.named_group import NAME
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.health.at_exit import leave_alone
from allstep.comm.join.launcher_store import WireStore
from allstep.comm.join.membership import Membership, membership
from allstep.errors import CollectiveTimeout, CommError, WorldError
from allstep.world import World


class Session:
    """The state of this process in its world: the other ranks, and the groups made with them.

    ```
    join, part      the rendezvous of the ranks, counted: default group and engine both need it
    init, shutdown  torch's default group, and groups for single purposes
    ```
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._joined: Joined | None = None
        self._num_holders = 0
        self._default: DefaultGroup | None = None
        self._is_registered = False

    def join(self, launcher: str | None = None) -> Joined:
        """Join the other ranks, unless that has been done. `part` must follow."""
        if self._joined is None:
            self._joined = join_ranks(launcher)
        self._num_holders += 1
        return self._joined

    def part(self) -> None:
        """Undo one `join`; the last one leaves the other ranks."""
        self._num_holders -= 1
        if self._num_holders == 0 and self._joined is not None:
            ended, self._joined = self._joined, None
            ended.close()

    def init(self, launcher: str | None = None) -> World:
        """Join the other ranks and create torch's default group, unless that has been done."""
        # A second thread waits for the world that the first one joins.
        with self._lock:
            while self._default is None:
                joined = self.join(launcher)
                try:
                    self._default = DefaultGroup(joined)
                except BaseException as error:
                    self.part()
                    if not self.may_join_next(joined, error):
                        raise
            self._leave_at_exit()
            return self._default.joined.world

    def may_join_next(self, joined: Joined, error: BaseException) -> bool:
        """Return whether a world that failed while it was formed is followed by another one."""
        is_left = self._joined is not joined
        return isinstance(error, CommError) and joined.is_elastic and is_left

    def shutdown(self) -> None:
        """Destroy the groups and leave the other ranks. `init` may be called again."""
        with self._lock:
            if self._default is None:
                return
            ended, self._default = self._default, None
            ended.close()
            self.part()

    @property
    def default(self) -> "DefaultGroup | None":
        """The groups that `init` made, until `shutdown`; else None."""
        return self._default

    def report(self, member: Membership, updates: int) -> None:
        """Report the updates of this process; see `report_updates`."""
        store = self._joined.rendezvous.store if self._joined is not None else None
        if isinstance(store, WireStore):
            member.report(store.client, updates)

    @property
    def changes(self) -> tuple[str, ...]:
        """The requests to leave the current world; see `requested_changes`."""
        watch = self._joined.end_watch if self._joined is not None else None
        return () if watch is None else watch.changes

    @property
    def must_leave(self) -> bool:
        """Whether the current world is to be left; see `must_leave`."""
        watch = self._joined.end_watch if self._joined is not None else None
        return watch is not None and (bool(watch.changes) or watch.is_over)

    def _leave_at_exit(self) -> None:
        """Register the clean-up at exit once, for scripts that do not call `shutdown`."""
        if not self._is_registered:
            atexit.register(self._leave_alone)
            self._is_registered = True

    def _leave_alone(self) -> None:
        """Keep the groups at exit without `shutdown`, so that the exit waits for no other rank."""
        if self._default is not None:
            groups = [*self._default.by_purpose.values(), *dist.distributed_c10d._world.pg_map]
            leave_alone([self._default.joined.rendezvous.store, *groups])


class DefaultGroup:
    """torch's default group, and further groups of all ranks for single purposes."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self.by_purpose: dict[str, AllstepGroup] = {}
        self.closers: list[weakref.WeakMethod[Callable[[], None]]] = []
        try:
            self._is_ours = _make_group(joined)
        except dist.DistStoreError as error:
            if not joined.is_elastic:
                raise
            raise _late(joined, error) from error
        try:
            # A rank must not leave while another one still connects to it.
            if joined.is_elastic and self._is_ours:
                dist.barrier()
            else:
                joined.wait_for_all("joined")
        except BaseException:
            self.close()
            raise

    def group_for(self, purpose: str) -> AllstepGroup:
        """Return the group of this purpose; all ranks make it together at the first call."""
        if purpose not in self.by_purpose:
            world, limits = self.joined.world, self.joined.limits
            store, name = self.joined.fresh_store(f"group for {purpose}"), f"allstep {purpose}"
            members, options = range(world.size), self.joined.group_options(purpose)
            self.by_purpose[purpose] = create_apart(
                store, name, world.rank, members, limits.start, limits.timeout, options
            )
        return self.by_purpose[purpose]

    def host_group_for(self, purpose: str) -> AllstepGroup | None:
        """Return the group of the ranks of this host; None if this rank is alone on it."""
        members, name = self._on_host, f"{purpose} of a host"
        if len(members) == 1:
            return None
        if name not in self.by_purpose:
            joined, limits = self.joined, self.joined.limits
            store = PrefixStore(str(members[0]), joined.fresh_store(f"group for {name}"))
            self.by_purpose[name] = create_apart(
                store, f"allstep {name}", joined.world.rank, members, limits.start, limits.timeout
            )
        return self.by_purpose[name]

    @cached_property
    def num_hosts(self) -> int:
        """The number of hosts of the world."""
        return len(set(self.joined.nodes))

    @cached_property
    def _on_host(self) -> list[int]:
        """The ranks of this host."""
        nodes, own = self.joined.nodes, self.joined.world.rank
        return [rank for rank, node in enumerate(nodes) if node == nodes[own]]

    def close(self) -> None:
        """Call the registered closers, then destroy the groups."""
        for closer in self.closers:
            if (close := closer()) is not None:
                close()
        for group in self.by_purpose.values():
            group.shutdown()
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()


_session = Session()


def session() -> Session:
    """Return the session of this process."""
    return _session


def init(launcher: str | None = None) -> World:
    """Join the other ranks and return this process's world: rank, size, local rank and host.

    A second call returns the same world. `launcher` is the launcher to trust for rank and size,
    such as "slurm" (default: detect it, see `allstep.world`).
    """
    return _session.init(launcher)


def shutdown() -> None:
    """Destroy the groups and leave the other ranks. `init` may be called again."""
    _session.shutdown()


def rejoin(updates: int | None = 0) -> World:
    """Leave the world, join the next one of an elastic run in this process, and return it.

    Called when a rank was lost (PeerLost), or when the launcher asks for it. All groups of the old
    world end. `updates`: how many updates this process has applied to its state, by which the
    launcher chooses the rank whose state the others take; None if it has no whole state. Raises
    `Dismissed` if this process is not in the next world.
    """
    member = membership()
    if member is None:
        raise WorldError(
            "rejoin(): the world of this run is fixed; start it with `allstep run --min-np N`"
        )
    member.updates = updates
    _session.shutdown()
    return _session.init()


def report_updates(updates: int) -> None:
    """Report to the launcher of an elastic run how many updates this process has applied.

    A no-op in a fixed world. The launcher learns that the worker makes progress, and how long a
    step takes.
    """
    member = membership()
    if member is not None:
        _session.report(member, updates)


def requested_changes() -> tuple[str, ...]:
    """Return the launcher's requests to leave the current world of an elastic run.

    Each is "grow", "shrink" or "mixed". They stay until the next world is joined.
    """
    return _session.changes


def must_leave() -> bool:
    """Return whether the launcher wants the current world of an elastic run to be left.

    It asks for that (`requested_changes`), or has ended the generation. For code that computes for
    long without a collective, which would raise PeerLost then.
    """
    return _session.must_leave


def needs_sync() -> bool:
    """Return whether ranks of this world of an elastic run have another state than its source."""
    member = membership()
    place = member.place if member is not None else None
    return place is not None and bool(place.new or place.behind)


def group_for(purpose: str) -> AllstepGroup:
    """Return a group of all ranks besides torch's default one; the same one for each `purpose`.

    Operations of one group do not wait for those of another. All ranks call this together. The
    group ends with `shutdown`.
    """
    if _session.default is None:
        raise WorldError(f"a group for {purpose}: call allstep.init() first")
    return _session.default.group_for(purpose)


def host_group_for(purpose: str) -> AllstepGroup | None:
    """Return a group of the ranks of this host, as `group_for` does; None if there is only one."""
    if _session.default is None:
        raise WorldError(f"a group for {purpose}: call allstep.init() first")
    return _session.default.host_group_for(purpose)


def num_hosts() -> int:
    """Return the number of hosts of the world; 1 before `init`."""
    return 1 if _session.default is None else _session.default.num_hosts


def at_shutdown(close: Callable[[], None]) -> None:
    """Register a method that `shutdown` calls before the groups end, if its object still exists."""
    if _session.default is not None:
        _session.default.closers.append(weakref.WeakMethod(close))


def is_running() -> bool:
    """Return whether `init` has been called without `shutdown`."""
    return _session.default is not None


def _make_group(joined: Joined) -> bool:
    """Create torch's default group, unless the script did; return whether it was created here."""
    world, limits = joined.world, joined.limits
    if dist.is_initialized():
        if dist.get_world_size() != world.size or dist.get_rank() != world.rank:
            raise WorldError(
                f"torch's default group has rank {dist.get_rank()} of {dist.get_world_size()}, but"
                f" {world.launcher} set {world.rank} of {world.size}: call allstep.init() instead"
                " of init_process_group"
            )
        return False
    if torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    count = dist.distributed_c10d._world.group_count
    try:
        dist.init_process_group(
            NAME,
            store=joined.fresh_store("group"),
            rank=world.rank,
            world_size=world.size,
            # For connecting to each other.
            timeout=timedelta(seconds=limits.start),
            pg_options=joined.group_options("default"),
        )
    except BaseException:
        # torch numbers groups, also one that failed on this rank and was not begun on another.
        dist.distributed_c10d._world.group_count = count
        raise
    _allow(limits.timeout)
    return True


def _late(joined: Joined, error: dist.DistStoreError) -> CollectiveTimeout:
    """Return the error about ranks that have joined a world and stopped while it was formed.

    As an error of allstep it lets an elastic run continue: this rank asks for the next world, and
    the launcher waits for the silent ranks, and kills them in the end.
    """
    world, seconds = joined.world, joined.limits.start
    return CollectiveTimeout(
        f"init: not all of {world.size} ranks have formed the world within {seconds:g} s ({error});"
        " look at their output, or raise ALLSTEP_START_TIMEOUT if they start slowly",
        rank=world.rank,
        op="init",
        seconds=seconds,
    )


def _allow(seconds: float) -> None:
    """Set the timeout of collectives of the default group."""
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=seconds))
