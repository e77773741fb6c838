"""How the ranks of a run join: every rank writes a card to the store and reads those of all others.

The cards make the world exact. A launcher gives each rank its own position, often not the others'.
From the cards every rank computes the same result: which ranks share a host, which cores they may
use, and which interface leads to the other hosts. Missing ranks are named in the error.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from allstep import faults, machine
from allstep.comm.health.cut_connections import begin_faults
from allstep.comm.health.threads import watch
from allstep.comm.join.attendance import attend, differing_programs, leave, program
from allstep.comm.join.launcher_store import WireStore, collect
from allstep.comm.join.rendezvous import Rendezvous, expected_host, find_store
from allstep.comm.timeline.timeline import begin_if_asked, stop_timeline
from allstep.console.escape import print_notice
from allstep.errors import WorldError
from allstep.limits import Limits, read_limits
from allstep.process.liveness import namespace
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
        fresh = self.fresh_store(what)
        _wait_for_all(fresh, self.world, self.rendezvous.store, self.limits)
        if self.world.rank:
            fresh.set(f"knows/{self.world.rank}", "")
        elif self.world.size > 1:
            fresh.wait(
                [f"knows/{rank}" for rank in range(1, self.world.size)],
                timedelta(seconds=self.limits.start),
            )

    @property
    def nodes(self) -> list[str]:
        """The host of each rank, by a name that no other host has."""
        return _nodes(self.cards)

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
        leave(self.rendezvous.store, self.world, self.number)
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
        _take_cores(world, cards)
        variables = _choose_interface(world, cards)
        begin_if_asked(PrefixStore(f"allstep/{number}", rendezvous.store), world.rank, world.size)
    except BaseException:
        _close(rendezvous)
        raise
    return Joined(world, rendezvous, limits, cards, number, variables)


def _wait_for_all(
    fresh: Store, world: World, store: Store, limits: Limits, value: str = ""
) -> list[str]:
    """Write `value` to an empty part of the store; return those of all ranks, by rank.

    Raises WorldError with the missing ranks.
    """
    started = time.monotonic()
    try:
        return collect(fresh, "rank", world.rank, world.size, value, limits.start)
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
    exact = places(_nodes(cards), world.launcher)[world.rank]
    given = local_variables(world, env)
    if given and (exact.local_rank, exact.local_size) != (world.local_rank, world.local_size):
        raise WorldError(
            f"according to {world.launcher}, rank {world.rank} is local rank {world.local_rank} of"
            f" {world.local_size} on {world.host} ({given}), but {exact.local_size} ranks joined"
            f" there, and it is local rank {exact.local_rank} of them"
        )
    return replace(exact, host=world.host)


def _nodes(cards: list[dict[str, Any]]) -> list[str]:
    """Return the host of each rank.

    Ranks of one machine to which the launcher gave the same local rank are on different hosts for
    the launcher (hosts simulated on one machine), and its view counts.
    """
    seen: Counter[tuple[str, int]] = Counter()
    nodes = []
    for card in cards:
        place = (card["node"], card["local_rank"])
        nodes.append(f"{card['node']} #{seen[place]}")
        seen[place] += 1
    return nodes


def _take_cores(world: World, cards: list[dict[str, Any]]) -> None:
    """Set the number of threads to our share of the host's cores, unless the user set a number."""
    if _user_set_threads(world):
        return
    nodes = _nodes(cards)
    masks = [
        card["cores"] for card, node in zip(cards, nodes, strict=True) if node == nodes[world.rank]
    ]
    torch.set_num_threads(
        machine.fair_share(cards[world.rank]["cores"], masks, machine.cpu_quota())
    )


def _user_set_threads(world: World) -> bool:
    """Return whether the user set OMP_NUM_THREADS.

    `allstep run` marks its own value; torchrun's own is 1.
    """
    value = machine.threads_by_user(os.environ)
    return value is not None and not (world.launcher == "torchrun" and value == "1")


def _choose_interface(world: World, cards: list[dict[str, Any]]) -> dict[str, str]:
    """Set the variables that name the network interface to the other hosts for Gloo and NCCL.

    Return those that were not set before. Without them, a host name that resolves to 127.0.1.1, as
    it often does, would mislead both.
    """
    nodes = _nodes(cards)
    others = [card for card, node in zip(cards, nodes, strict=True) if node != nodes[world.rank]]
    addresses = [
        *(address for card in others for address in card["addresses"][:1]),
        *cards[world.rank]["addresses"][1:],
    ]
    interface: str | None = "lo"
    if others:
        source = next(
            (source for address in addresses if (source := machine.route_to(address))), None
        )
        interface = machine.interface_of(source) if source else None
    if not interface:
        return {}
    names = (
        ["GLOO_SOCKET_IFNAME"]
        if interface == "lo"
        else ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    )
    chosen = {name: interface for name in names if name not in os.environ}
    os.environ.update(chosen)
    return chosen
