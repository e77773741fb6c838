"""How the ranks of a run join: every rank writes a card to the store and reads those of all others.

The cards make the world exact. A launcher gives each rank its own position, often not the others'.
From the cards every rank computes the same result: which ranks share a host, which cores they may
use, and which interface leads to the other hosts. Missing ranks are named in the error.

In an elastic run the launcher collects the cards and sends them to every rank of the next world
(`membership`). All that ranks count in step starts at zero there, below a key of the generation.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from allstep import faults
from allstep.comm.group.build_memory import WorldOptions, memory_card
from allstep.comm.group.host_share import choose_interface, nodes_of, take_cores
from allstep.comm.health.cut_connections import begin_faults
from allstep.comm.health.generation_end import EndWatch
from allstep.comm.health.joined_processes import forget, lives_in, remember
from allstep.comm.health.processes import Lives
from allstep.comm.health.threads import watch
from allstep.comm.join.attendance import attend, differing_programs, leave, program
from allstep.comm.join.launcher_store import WireStore, collect, wait_for
from allstep.comm.join.membership import Membership, membership
from allstep.comm.join.rendezvous import (
    Rendezvous,
    connect_to_launcher,
    expected_host,
    find_store,
)
from allstep.comm.memory.kept import WorldMemory, kept_memory
from allstep.comm.timeline.timeline import begin_if_asked, count_again, stop_timeline
from allstep.console.escape import print_notice
from allstep.errors import CommError, PeerLost, WorldError
from allstep.limits import Limits, read_limits
from allstep.process.deferred_signals import defer_stop_signals
from allstep.process.liveness import namespace
from allstep.wire.keys import end_of
from allstep.world import World, local_variables, node_of, places


@dataclass
class Joined:
    """The joined ranks: our exact world, the store that all share, and the card of each rank.

    Several components of a process may need this at once (torch's default group, the engine of
    named operations): `Session` counts them, and the last one to leave closes it.
    """

    world: World
    rendezvous: Rendezvous
    limits: Limits
    cards: list[dict[str, Any]]
    number: int
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that were set when the ranks joined."""
    end_watch: EndWatch | None = None
    """Waits for the end of this generation; None in a fixed world."""
    memory: WorldMemory | None = None
    """The shared memory of the groups of this generation; None in a fixed world."""
    _used: Counter[str] = field(default_factory=Counter)

    def fresh_store(self, what: str) -> Store:
        """Return a part of the store that is still empty.

        All ranks request the same names in the same order.
        """
        self._used[what] += 1
        return PrefixStore(
            f"allstep/{self.number}/{what}/{self._used[what]}", self.rendezvous.store
        )

    def wait_for_all(self, what: str) -> None:
        """Wait for all ranks; in rank 0, also until every rank knows that all have arrived.

        Rank 0 may serve the store, and its script may end right after this: a rank that still waits
        for an answer would lose it.
        """
        fresh, rank = self.fresh_store(what), self.world.rank
        check = self.check_for(what, fresh, "rank")
        _wait_for_all(fresh, self.world, self.rendezvous.store, self.limits, check=check)
        if rank:
            fresh.set(f"knows/{rank}", "")
        elif self.world.size > 1:
            keys = [f"knows/{other}" for other in range(1, self.world.size)]
            wait_for(fresh, keys, self.limits.start, self.check_for(what, fresh, "knows"))

    def check_for(self, what: str, store: Store, prefix: str) -> Callable[[], None]:
        """Return a function for a wait in a store: it raises PeerLost if a rank cannot come.

        That is a rank whose process on this host has ended before it wrote the key of its rank
        under `prefix`. `what`: the description of the wait in the error.
        """
        lives = lives_in(self.rendezvous.store, range(self.world.size))
        return partial(_check_lives, lives, what, store, prefix, self.world.rank)

    def group_options(self, purpose: str) -> WorldOptions | None:
        """Return the options of a group of all ranks; None in a fixed world.

        purpose: the same in each generation, which then uses the same memory.
        """
        if self.memory is None:
            return None
        return WorldOptions(cards=tuple(self.cards), memory=self.memory, purpose=purpose)

    @property
    def is_elastic(self) -> bool:
        """Whether the world may be followed by another one in the same processes."""
        return self.end_watch is not None

    @property
    def nodes(self) -> list[str]:
        """The host of each rank, by a name that no other host has."""
        return nodes_of(self.cards)

    @property
    def neighbours(self) -> dict[int, int]:
        """The pids of the other ranks of our host, by rank, if they are in our pid namespace."""
        nodes, rank, own = self.nodes, self.world.rank, namespace() or None
        here = [other for other, node in enumerate(nodes) if node == nodes[rank] and other != rank]
        return {
            other: self.cards[other]["pid"]
            for other in here
            if self.cards[other]["namespace"] == own
        }

    def close(self) -> None:
        """Leave the other ranks; close the store's connection, and its server if we run it."""
        stop_timeline()
        forget(self.rendezvous.store)
        if self.end_watch is None:
            leave(self.rendezvous.store, self.world, self.number)
        else:
            self.end_watch.close()
        _close(self.rendezvous)
        # Processes started later, perhaps on other hosts, must not inherit our interface.
        for name, value in self.variables.items():
            if os.environ.get(name) == value:
                del os.environ[name]


def _close(rendezvous: Rendezvous) -> None:
    if rendezvous.server is not None:
        watch().not_at_end(rendezvous.server.close)
    rendezvous.close()


def join_ranks(launcher: str | None) -> Joined:
    """Join the other ranks of a fixed world, or those of the next world of an elastic run."""
    member = membership()
    if member is None:
        return _join_fixed(launcher)
    if member.place is None:
        defer_stop_signals(os.environ)
    while True:
        try:
            return _join_generation(member)
        except PeerLost:
            # This world has ended already: a second rank was lost. Another one follows.
            continue


def _join_generation(member: Membership) -> Joined:
    """Ask the launcher for our place, with the cards of all ranks."""
    limits = read_limits()
    store = connect_to_launcher(limits)
    rendezvous = Rendezvous(store)
    # A connection of its own, which `close` ends.
    ends = connect_to_launcher(limits).client
    try:
        place = member.ask(store.client, _elastic_card(store))
        world, cards = place.world, _with_local_ranks(place.cards)
        begin_faults(world.rank, world.size, place.faults)
        if faults.active is not None:
            faults.active.in_phase("forming")
        store.unless = end_of(place.generation)
        os.environ.update({**world.to_env(), **world.to_horovod_env()})
        take_cores(world, cards)
        variables = choose_interface(world, cards)
        number = place.generation + 1
        count_again()
        # A later world would replace the file of the first.
        if place.generation == 0:
            begin_if_asked(PrefixStore(f"allstep/{number}", store), world.rank, world.size)
    except BaseException:
        ends.close_all()
        _close(rendezvous)
        raise
    end_watch = EndWatch(ends, place.generation, world.rank, store)
    joined = Joined(world, rendezvous, limits, cards, number, variables, end_watch)
    joined.memory = WorldMemory(place.generation, _claims_here(world.rank, cards), kept_memory())
    remember(store, joined.neighbours)
    return joined


def _elastic_card(store: Store) -> dict[str, Any]:
    """Return our card with all that the ranks need to form groups of the whole world."""
    return {**_card(World.detect(), store), **memory_card(), "memory": kept_memory().claims()}


def _claims_here(rank: int, cards: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
    """Return the memory that each rank of our host holds, by rank."""
    node = cards[rank]["node"]
    return {other: card["memory"] for other, card in enumerate(cards) if card["node"] == node}


def _with_local_ranks(cards: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the cards with each rank's number on its host, in this world."""
    worlds = places([card["host"] for card in cards])
    return [
        {**card, "local_rank": world.local_rank, "local_size": world.local_size}
        for card, world in zip(cards, worlds, strict=True)
    ]


def _join_fixed(launcher: str | None) -> Joined:
    """Find the store, write our card, and wait for those of all ranks."""
    limits = read_limits()
    world = World.detect(launcher)
    begin_faults(world.rank, world.size)
    rendezvous = find_store(world, limits)
    try:
        number = attend(rendezvous.store, world)
        if faults.active is not None:
            faults.active.in_phase("forming")
        cards = _exchange_cards(world, rendezvous.store, limits, number)
        rendezvous.all_joined()
        programs, local_ranks = zip(
            *((card["program"], card["local_rank"]) for card in cards), strict=True
        )
        if world.rank == 0 and (line := differing_programs(programs, local_ranks)):
            print_notice(line)
        if rendezvous.server is not None:
            # No rank waits for a server whose process is being torn down.
            watch().at_end(rendezvous.server.close)
        world = exact(world, cards)
        take_cores(world, cards)
        variables = choose_interface(world, cards)
        begin_if_asked(PrefixStore(f"allstep/{number}", rendezvous.store), world.rank, world.size)
    except BaseException:
        _close(rendezvous)
        raise
    joined = Joined(world, rendezvous, limits, cards, number, variables)
    remember(rendezvous.store, joined.neighbours)
    return joined


def _check_lives(lives: Lives, what: str, store: Store, prefix: str, rank: int) -> None:
    lost = lives.lost(closely=True)
    while lost is not None:
        if not store.check([f"{prefix}/{lost}"]):
            raise PeerLost(
                f"lost rank {lost} (process exited); rank {rank} waited for it: {what}",
                rank=rank,
                op=what,
                peer=lost,
            )
        # It has done its part, and may end before the others have read that.
        lives.forget(lost)
        lost = lives.lost(closely=True)


def _wait_for_all(
    fresh: Store,
    world: World,
    store: Store,
    limits: Limits,
    value: str = "",
    check: Callable[[], None] | None = None,
) -> list[str]:
    """Write `value` to an empty part of the store; return those of all ranks, by rank.

    Raises WorldError with the missing ranks. `check`: see `wait_for`.
    """
    started = time.monotonic()
    try:
        return collect(fresh, "rank", world.rank, world.size, value, limits.start, check)
    # A rank is lost, or the generation has ended.
    except CommError:
        raise
    except RuntimeError as error:
        missing = [rank for rank in range(world.size) if not fresh.check([f"rank/{rank}"])]
        raise WorldError(_absent(missing, world, store, time.monotonic() - started)) from error


def _exchange_cards(
    world: World, store: Store, limits: Limits, number: int
) -> list[dict[str, Any]]:
    """Write our card and return those of all ranks, by rank."""
    card = json.dumps(_card(world, store))
    fresh = PrefixStore(f"allstep/meet/{number}", store)
    return [json.loads(found) for found in _wait_for_all(fresh, world, store, limits, card)]


def _card(world: World, store: Store) -> dict[str, Any]:
    return {
        "node": node_of(world),
        "host": world.host,
        "pid": os.getpid(),
        "program": program(),
        "namespace": namespace(),
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "cores": sorted(os.sched_getaffinity(0)),
        "addresses": _own_and_stores_address(store),
    }


def _own_and_stores_address(store: Store) -> list[str]:
    """Return two addresses that lead to other hosts: ours towards the store, and the store's.

    Loopback addresses are left out.
    """
    if not isinstance(store, WireStore):
        return []
    found = [store.client.local_address, store.client.server_address[0]]
    return [address for address in found if not address.startswith("127.") and address != "::1"]


def _absent(missing: list[int], world: World, store: Store, seconds: float) -> str:
    names = []
    for rank in missing:
        host = expected_host(rank, world, store)
        names.append(f"rank {rank} on {host}" if host else f"rank {rank} (host unknown)")
    return (
        f"{len(missing)} of {world.size} ranks did not join within {seconds:.0f} s:"
        f" {', '.join(names)}. Check that every rank calls allstep.init() and that none exited"
        " before; ALLSTEP_START_TIMEOUT sets the time limit"
    )


def exact(world: World, cards: list[dict[str, Any]], env: Mapping[str, str] | None = None) -> World:
    """Return the world with every number as the cards show it.

    Raises WorldError if that contradicts what the launcher gave for our host.
    """
    exact = places(nodes_of(cards), world.launcher)[world.rank]
    given = local_variables(world, env)
    if given and (exact.local_rank, exact.local_size) != (world.local_rank, world.local_size):
        raise WorldError(
            f"according to {world.launcher}, rank {world.rank} is local rank {world.local_rank} of"
            f" {world.local_size} on {world.host} ({given}), but {exact.local_size} ranks joined"
            f" there, and it is local rank {exact.local_rank} of them"
        )
    return replace(exact, host=world.host)
