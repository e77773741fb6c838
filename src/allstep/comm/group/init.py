"""`allstep.init()`: from a started process to a rank that can work with the others.

Five steps: detect who we are, find the store that all ranks share, meet there (`joined`), take our
share of cores and our GPU, and make torch's default process group. One process is a real group,
too.

What a process has of all this is one object, a `Session`. It can be closed, and opened again.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from allstep.comm.group.backend import create_apart
from allstep.comm.group.joined import Joined, join_ranks
from allstep.comm.group.process_group import NAME, AllstepGroup
from allstep.comm.health.at_exit import leave_alone
from allstep.errors import WorldError
from allstep.world import World


class Session:
    """All that a process keeps about its world: who the others are, and the groups made on top.

    ```
    join, part      the meeting of the ranks, counted: the default group and the engine both need it
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
        """Meet the other ranks, unless that has been done. `part` must follow."""
        if self._joined is None:
            self._joined = join_ranks(launcher)
        self._num_holders += 1
        return self._joined

    def part(self) -> None:
        """End what one `join` began; the last one leaves the other ranks."""
        self._num_holders -= 1
        if self._num_holders == 0 and self._joined is not None:
            ended, self._joined = self._joined, None
            ended.close()

    def init(self, launcher: str | None = None) -> World:
        """Join, and make torch's default group. A second call returns the same world."""
        # A second thread waits for the world that the first one joins.
        with self._lock:
            if self._default is not None:
                return self._default.joined.world
            joined = self.join(launcher)
            try:
                made = DefaultGroup(joined)
            except BaseException:
                self.part()
                raise
            self._default = made
            self._leave_at_exit()
            return joined.world

    def shutdown(self) -> None:
        """End the groups and leave the ranks. `init` may be called again."""
        with self._lock:
            if self._default is None:
                return
            ended, self._default = self._default, None
            ended.close()
            self.part()

    @property
    def default(self) -> "DefaultGroup | None":
        """What `init` made, until `shutdown`."""
        return self._default

    def _leave_at_exit(self) -> None:
        """A script need not call `shutdown`. Registered once, however often the process joins."""
        if not self._is_registered:
            atexit.register(self._leave_alone)
            self._is_registered = True

    def _leave_alone(self) -> None:
        """At the exit of a process that has not called `shutdown`: wait for no other rank."""
        if self._default is not None:
            groups = [*self._default.by_purpose.values(), *dist.distributed_c10d._world.pg_map]
            leave_alone([self._default.joined.rendezvous.store, *groups])


class DefaultGroup:
    """torch's default group, and groups of all ranks for single purposes next to it."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self._is_ours = _make_group(joined)
        # A rank must not leave while another one still connects to it.
        joined.wait_for_all("joined")
        self.by_purpose: dict[str, AllstepGroup] = {}
        self.closers: list[weakref.WeakMethod[Callable[[], None]]] = []

    def group_for(self, purpose: str) -> AllstepGroup:
        """Return the group of this purpose; made by all ranks together when they first ask for it."""
        if purpose not in self.by_purpose:
            world, limits = self.joined.world, self.joined.limits
            store, name = self.joined.fresh_store(f"group for {purpose}"), f"allstep {purpose}"
            members = range(world.size)
            made = create_apart(store, name, world.rank, members, limits.start, limits.timeout)
            self.by_purpose[purpose] = made
        return self.by_purpose[purpose]

    def close(self) -> None:
        """Close what was registered, then the groups."""
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
    """Join the other ranks and return our place among them. A second call returns the same world.

    launcher: which launcher to trust for rank and size, instead of detecting it (see
    `allstep.world`).
    """
    return _session.init(launcher)


def shutdown() -> None:
    """Leave the group. `init` may be called again."""
    _session.shutdown()


def group_for(purpose: str) -> AllstepGroup:
    """Return a group of all ranks next to torch's default one, the same for each call with this
    purpose.

    Operations of one group do not wait for those of another. All ranks ask for it together. It ends
    with `shutdown`.
    """
    if _session.default is None:
        raise WorldError(f"a group for {purpose}: call allstep.init() first")
    return _session.default.group_for(purpose)


def at_shutdown(close: Callable[[], None]) -> None:
    """Have a method called by `shutdown`, before the groups end, if its object still exists then."""
    if _session.default is not None:
        _session.default.closers.append(weakref.WeakMethod(close))


def is_running() -> bool:
    """Whether `init` has been called, and `shutdown` has not."""
    return _session.default is not None


def _make_group(joined: Joined) -> bool:
    """torch's default group, unless the script made one itself; whether we made it."""
    world, limits = joined.world, joined.limits
    if dist.is_initialized():
        if dist.get_world_size() != world.size or dist.get_rank() != world.rank:
            raise WorldError(
                f"torch's default group has rank {dist.get_rank()} of {dist.get_world_size()}, but"
                f" {world.launcher} says {world.rank} of {world.size}: call allstep.init() instead"
                " of init_process_group"
            )
        return False
    if torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    dist.init_process_group(
        NAME,
        store=joined.fresh_store("group"),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=limits.start),  # for connecting to each other
    )
    _allow(limits.timeout)
    return True


def _allow(seconds: float) -> None:
    """From now on a collective may take so long."""
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=seconds))
