"""Connect a worker with the servers of a new store. All workers call this together."""

import json
import secrets
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from allstep.comm.group.joined import Joined
from allstep.comm.health.helper_thread import call_in_thread
from allstep.comm.join.launcher_store import collect
from allstep.errors import CommError, PeerLost
from allstep.kvstore.links.all_links import Links
from allstep.kvstore.links.announced import Announced, announce, up_key
from allstep.kvstore.links.loss_log import LossLog
from allstep.kvstore.links.own_server import OwnServer, own_server
from allstep.kvstore.links.pair import Pair
from allstep.kvstore.memory.bounded_wait import BoundedWait, Others
from allstep.kvstore.rules.store_kinds import StoreKind

_LOOK_SECONDS = 0.05


def host_numbers(joined: Joined) -> tuple[int, ...]:
    """Return the host of each rank, counted from 0 in order of their first ranks."""
    nodes = list(dict.fromkeys(joined.nodes))
    return tuple(nodes.index(node) for node in joined.nodes)


def connected(joined: Joined, kind: StoreKind, num_started: int, others: Others) -> Links:
    """Return the links of this worker to all servers.

    num_started: servers that `allstep run` has started; 0: the first worker of each host starts
    one.
    """
    hosts, rank = host_numbers(joined), joined.world.rank
    store = joined.rendezvous.store
    own = own_server(store) if not num_started and hosts.index(hosts[rank]) == rank else None
    given = json.dumps([own.name if own else None, secrets.token_hex(8)])
    fresh = joined.fresh_store("kvstore servers")
    check = joined.check_for(f"kvstore.create({kind.name!r})", fresh, "of")
    cards = [
        json.loads(text)
        for text in collect(
            fresh, "of", rank, len(hosts), given, joined.limits.start, _both(check, own)
        )
    ]
    names = [str(k) for k in range(num_started)] or [name for name, _ in cards if name]
    stores = [
        Announced(cards[0][1], number, kind.mode, kind.rounds, hosts)
        for number in range(len(names))
    ]
    if rank == 0:
        for name, announced in zip(names, stores, strict=True):
            announce(store, name, announced)
    where = [_wait_until_up(store, kind, name, n, others, own) for n, name in enumerate(names)]
    pairs = [
        _pair(announced, store, others, rank, f"server {announced.server} on {host}")
        for announced, host in zip(stores, where, strict=True)
    ]
    links = Links(pairs, where, others)
    links.log = LossLog(fresh, rank, len(names), others.limits.lost)
    if own is not None:
        own.links.add(links)
    return links


def _both(check: Callable[[], None], own: OwnServer | None) -> Callable[[], None]:
    def check_both() -> None:
        check()
        _check_own(own)

    return check_both


def _check_own(own: OwnServer | None) -> None:
    if own is not None and own.has_ended():
        raise CommError(
            "kvstore: the server process that this worker started has ended; its own error is above"
        )


def _wait_until_up(
    store: Store, kind: StoreKind, name: str, number: int, others: Others, own: OwnServer | None
) -> str:
    """Return the host of a server, once it is ready."""
    end = time.monotonic() + others.limits.start
    # Not `wait`: torch's store logs each wait that times out.
    while not store.check([up_key(name)]):
        others.check_generation()
        _check_own(own)
        if time.monotonic() > end:
            raise CommError(
                f"kvstore.create({kind.name!r}): server {number} did not start within"
                f" {others.limits.start:.0f} s; its output may show why, and"
                " ALLSTEP_START_TIMEOUT sets the limit",
                rank=others.names[others.rank],
            )
        time.sleep(_LOOK_SECONDS)
    return str(json.loads(store.get(up_key(name)))["host"])


def _pair(announced: Announced, store: Store, others: Others, rank: int, who: str) -> Pair:
    """Connect to one server, which connects to the workers in order of rank."""
    text = f"kvstore: connecting to {who}"
    waiting = BoundedWait(others, text)

    def connect() -> Pair:
        return Pair(announced.link(store, rank), others.limits, is_server=False)

    try:
        made: Pair = call_in_thread(connect, lambda: waiting.check_limits(who))
    except CommError:
        raise
    except RuntimeError as error:
        raise PeerLost(
            f"{text}: no connection within {waiting.seconds:.0f} s:"
            f" {str(error).partition(chr(10))[0]}",
            rank=rank,
        ) from error
    return made
