"""Builds the shared memory of a group and the lanes between its hosts.

Every rank writes a card to the group's store; from all cards every rank computes the same layout
(`host_map`).

```
one host             one arena for all ranks
several hosts        an arena on each host, and a lane for each slice. If one host cannot share
                     memory, all ranks use Gloo
one host, study      if an algorithm is named, every rank counts as a host of its own: the
                     algorithm moves everything, over Gloo
```
"""

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from allstep import machine
from allstep.comm.group.across_hosts import Crossing
from allstep.comm.group.host_map import Layout
from allstep.comm.group.within_host import SharedMemoryTransport
from allstep.comm.health.guard import Guard
from allstep.comm.health.processes import Lives
from allstep.comm.join.launcher_store import collect
from allstep.comm.memory.arena import Arena, arena_sizes, block_bytes, flags_and_texts
from allstep.comm.memory.kept import WorldMemory, new_memory
from allstep.comm.memory.segment import CannotShare
from allstep.comm.memory.wait_flags import Flags, spins_for
from allstep.comm.network.algorithms import VARIABLE, wanted_algorithm
from allstep.comm.network.guarded_gloo import connected
from allstep.comm.network.lane import Lane
from allstep.errors import ConfigError, WorldError
from allstep.limits import read_limits
from allstep.process.liveness import namespace
from allstep.world import World, node_of

DEFAULT_POOL_MB = 8


@dataclass(frozen=True)
class Options:
    """Options of a group: `new_group(backend="allstep", pg_options=Options(algorithm="ring"))`.

    `algorithm` is the algorithm between hosts: ring, tree, butterfly, star, native or auto
    (default: ALLSTEP_ALGORITHM, else auto). One other than auto also replaces shared memory in
    all_reduce on one host, to study it. `nccl` are `ProcessGroupNCCL.Options` for CUDA tensors
    (default: NCCL's own).
    """

    algorithm: str | None = None
    nccl: Any = None


@dataclass(frozen=True)
class WorldOptions(Options):
    """Options of a group of all ranks of a generation, whose cards the launcher has sent.

    cards: of all ranks, by rank. memory: of the generation. purpose: of the group, the same in each
    generation.
    """

    cards: tuple[dict[str, Any], ...] = ()
    memory: WorldMemory | None = None
    purpose: str = ""


Card = dict[str, Any]
"""What the ranks of a group know of one of them."""


def exchange_cards(
    store: Store, rank: int, size: int, options: Options, guard: Guard
) -> list[Card]:
    """Write our card and return those of all ranks, by rank.

    Raises as soon as a rank is lost whose process `guard` watches.
    """
    wanted = wanted_algorithm(options.algorithm)
    own = {
        "node": _node(),
        "pid": os.getpid(),
        "namespace": namespace(),
        "cores": sorted(os.sched_getaffinity(0)),
        **memory_card(),
        "algorithm": wanted.name if wanted else "auto",
        "study": wanted is not None and (options.algorithm is not None or _is_alone()),
    }
    check = guard.check_for("the cards of a group")
    start = read_limits().start
    found = collect(store, "host", rank, size, json.dumps(own), start, check)
    cards = [json.loads(card) for card in found]
    _check_same_algorithm(cards)
    return cards


def memory_card() -> Card:
    """Return what a card has for the memory of a group, the same for all groups of a process."""
    wanted = wanted_algorithm(None)
    return {
        "pool": pool_bytes(),
        "block": block_bytes(machine.cache_sizes().get(2)),
        "algorithm": wanted.name if wanted else "auto",
    }


def world_cards(options: WorldOptions) -> list[Card]:
    """Return the cards of all ranks of a generation, by rank, as `exchange_cards` does."""
    is_alone = len({card["node"] for card in options.cards}) == 1
    cards = [{**card, "study": is_alone and card["algorithm"] != "auto"} for card in options.cards]
    _check_same_algorithm(cards)
    return cards


def join_hosts(
    store: Store,
    rank: int,
    cards: list[Card],
    timeout: timedelta,
    options: Options,
    guard: Guard,
) -> SharedMemoryTransport | None:
    """Return the transport over shared memory, and over hosts by slices.

    None if a host cannot share memory: then Gloo does everything. All ranks get the same answer. A
    single rank has an arena of its own, which is faster than Gloo.
    """
    start, size = read_limits().start, len(cards)
    guard.watch_processes(Lives(_neighbours(rank, cards)))
    layout = Layout.of(rank, [card["node"] for card in cards])
    if len(layout.hosts) == 1 and all(card["study"] for card in cards):
        layout = Layout.of(rank, [str(each) for each in range(size)])
    arena = _make_arena(store, layout, cards, start, guard, options)
    if len(layout.hosts) > 1 and "no" in collect(
        store,
        "shared",
        rank,
        size,
        "yes" if arena else "no",
        start,
        guard.check_for("shared memory of a group"),
    ):
        return None
    if arena is None:
        return None
    guard.add_channel(arena)
    crossing = _make_crossing(store, layout, timeout, options, guard) if layout.num_lanes else None
    purpose = options.purpose if isinstance(options, WorldOptions) else None
    return SharedMemoryTransport(arena, layout, guard, crossing, purpose)


def _neighbours(rank: int, cards: list[Card]) -> dict[int, int]:
    """Return the pids of the other ranks of our host, by rank, if in our pid namespace."""
    own = cards[rank]["node"], namespace() or None
    same = [other for other, card in enumerate(cards) if (card["node"], card["namespace"]) == own]
    return {other: cards[other]["pid"] for other in same if other != rank}


def _check_same_algorithm(cards: list[Card]) -> None:
    named: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        named.setdefault(card["algorithm"], []).append(rank)
    if len(named) > 1:
        groups = "; ".join(
            f"{name} on ranks {', '.join(map(str, ranks))}" for name, ranks in named.items()
        )
        raise ConfigError(
            f"ranks request different algorithms ({groups}); set {VARIABLE} to the same value on"
            " every rank"
        )


def _make_arena(
    store: Store, layout: Layout, cards: list[Card], start: float, guard: Guard, options: Options
) -> Arena | None:
    """Return the shared memory of our host; None if it cannot be shared."""
    ours = [cards[rank] for rank in layout.neighbours]
    rank, size = layout.local_rank, len(ours)
    sizes = arena_sizes(size, min(card["pool"] for card in ours))
    own_store = PrefixStore(f"segment/{layout.host}", store)
    check = guard.check_for("shared memory of a group")
    try:
        if isinstance(options, WorldOptions) and options.memory is not None:
            memory = options.memory.get(
                options.purpose, layout.neighbours, sizes, own_store, rank, start, check
            )
        else:
            memory = new_memory(own_store, rank, size, sizes, start, check)
    except CannotShare:
        return None
    control, texts = flags_and_texts(memory.control, size)
    num_cores = len(set().union(*(card["cores"] for card in ours)))
    spins = spins_for(size, min(num_cores, int(machine.cpu_quota() or num_cores)))
    flags = Flags(control, rank, [card["pid"] for card in ours], spins, guard, layout.neighbours)
    # A container may hide the caches from one rank and show them to another.
    return Arena(flags, texts, memory.pools, min(card["block"] for card in ours))


def _make_crossing(
    store: Store, layout: Layout, timeout: timedelta, options: Options, guard: Guard
) -> Crossing:
    if not layout.lane:
        return Crossing(layout.num_lanes, None)
    lane_store = PrefixStore(f"lane/{layout.local_rank}", store)
    transport = connected(lane_store, layout.host, len(layout.hosts), timeout, guard, layout.lane)
    return Crossing(
        layout.num_lanes,
        Lane(transport, wanted_algorithm(options.algorithm), guard.check_while_waiting),
    )


def pool_bytes() -> int:
    """Return the bytes of each rank's pool, for tensors outside shared memory.

    ALLSTEP_POOL_MB megabytes (default: 8).
    """
    text = os.environ.get("ALLSTEP_POOL_MB", str(DEFAULT_POOL_MB))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1024:
        raise ConfigError(f"ALLSTEP_POOL_MB={text!r} is not a number of megabytes from 1 to 1024")
    return int(value * (1 << 20)) // 4096 * 4096


def _node() -> str:
    """Return the name of our host, as the launcher calls it if there is one."""
    return node_of(_world())


def _is_alone() -> bool:
    """Return whether the whole world is on one host.

    Then an algorithm that is named for all groups can only be meant for study.
    """
    return _world().cross_size == 1


def _world() -> World:
    try:
        return World.detect()
    except WorldError:
        return World.alone()
