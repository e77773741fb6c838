"""Which ranks of a group share a host, and the shared memory between them."""

import json
import os

from torch._C._distributed_c10d import PrefixStore, Store

from allstep import machine
from allstep.comm.arena import WORDS, Arena, segment_bytes
from allstep.comm.local import LocalMover
from allstep.comm.segment import parts, share
from allstep.comm.store import collect
from allstep.comm.wait import Flags, control_bytes, spins_for
from allstep.errors import CommError, ConfigError, WorldError
from allstep.limits import read_limits
from allstep.world import World, node_of

DEFAULT_POOL_MB = 8


def join_host(store: Store, rank: int, size: int, timeout: float) -> LocalMover | None:
    """Shared memory between all ranks of a group; None when they are not all on one host, or cannot share. All ranks agree on which."""
    if size == 1:
        return None
    start = read_limits().start
    card = {"node": _node(), "pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0)), "pool": pool_bytes()}
    cards = [json.loads(word) for word in collect(store, "host", rank, size, json.dumps(card), start)]
    if any(other["node"] != card["node"] for other in cards):
        return None
    pool = min(other["pool"] for other in cards)
    try:
        segment = share(PrefixStore("segment", store), rank, size, segment_bytes(size, pool), start)
    except CommError:
        return None
    control, words, *pools = parts(segment, control_bytes(size), size * WORDS, *[pool] * size)
    num_cores = len(set().union(*(other["cores"] for other in cards)))
    spins = spins_for(size, min(num_cores, int(machine.cpu_quota() or num_cores)))
    flags = Flags(control, rank, [other["pid"] for other in cards], spins)
    return LocalMover(Arena(flags, words, pools, timeout))


def pool_bytes() -> int:
    """The pool of each rank, for tensors that do not live in shared memory: ALLSTEP_POOL_MB, 8 when not set."""
    text = os.environ.get("ALLSTEP_POOL_MB", str(DEFAULT_POOL_MB))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1024:
        raise ConfigError(f"ALLSTEP_POOL_MB={text!r} is not a number of megabytes from 1 to 1024")
    return int(value * (1 << 20)) // 4096 * 4096


def _node() -> str:
    """The host in the launcher's words where there is a launcher."""
    try:
        return node_of(World.detect())
    except WorldError:
        return node_of(World.alone())
