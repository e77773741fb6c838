"""Seconds of an allreduce of `nbytes` over `num_ranks`, by algorithm.

The files in `allstep.comm.network.algorithms` have the procedures, with drawings from which their
formulas follow. Two more formulas are for hosts with several workers each: `by_slice`, which is how
allstep reduces there, and `flat_ring`, a ring through all workers of all hosts.

    tree        ceil(log2 p) (2 (alpha + n beta) + n gamma)
    ring        max((p-1) (2 wire + add(f)),  (p-1) add(b) + (p-2) wire + 2 move(f))
                chunks of b = n/p bytes in s segments, the first of f; wire = s alpha + b beta
    butterfly   2 log2 q alpha + 2 (q-1)/q n beta + (q-1)/q n gamma, q the power of two in p
                [+ 2 (alpha + n beta) + n gamma  if p is no power of two]
    star        move + add + (p-2) max(move, add) + (p-1) move
"""

from collections.abc import Callable
from math import ceil

from allstep.costs.speed import Speed

Cost = Callable[[int, float, Speed], float]

SEGMENT = 1 << 20
"""Bytes of a segment of `ring`, and the largest segment of Gloo's ring."""


def tree(num_ranks: int, nbytes: float, speed: Speed) -> float:
    """Return the seconds of the binomial tree."""
    rounds = (num_ranks - 1).bit_length()  # log2, rounded up
    return rounds * (2 * speed.moving(nbytes) + speed.combining(nbytes)) if nbytes else 0.0


def ring(num_ranks: int, nbytes: float, speed: Speed, segment: int = SEGMENT) -> float:
    """Return the seconds of the ring whose chunks travel in segments."""
    chunk = nbytes / num_ranks
    return _pipelined(num_ranks, chunk, ceil(chunk / segment), min(chunk, segment), speed)


def native(num_ranks: int, nbytes: float, speed: Speed) -> float:
    """Return the seconds of Gloo's ring, which cuts each chunk into at least two segments."""
    chunk = nbytes / num_ranks
    segments = 2 * ceil(chunk / (2 * SEGMENT))
    return _pipelined(num_ranks, chunk, segments, min(chunk / 2, SEGMENT), speed)


def butterfly(num_ranks: int, nbytes: float, speed: Speed) -> float:
    """Return the seconds of the butterfly: halves, quarters, ... and back."""
    if not nbytes:
        return 0.0
    size = power_of_two(num_ranks)
    seconds = sum(
        2 * speed.moving(nbytes / 2**i) + speed.combining(nbytes / 2**i)
        for i in range(1, size.bit_length())
    )
    fold = 2 * speed.moving(nbytes) + speed.combining(nbytes)
    return seconds + (fold if num_ranks > size else 0.0)


def star(num_ranks: int, nbytes: float, speed: Speed) -> float:
    """Return the seconds if all send to rank 0, which adds and sends the result to all."""
    if num_ranks == 1 or not nbytes:
        return 0.0
    move, add = speed.moving(nbytes), speed.combining(nbytes)
    return move + add + (num_ranks - 2) * max(move, add) + (num_ranks - 1) * move


def power_of_two(size: int) -> int:
    """Return the largest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)


# Of algorithms with about the same cost the first is taken: fewest messages first.
COSTS: dict[str, Cost] = {
    "tree": tree,
    "ring": ring,
    "butterfly": butterfly,
    "star": star,
    "native": native,
}

# The accuracy of the formulas: costs within this factor count as equal.
ABOUT = 1.05


def cheapest(num_ranks: int, nbytes: float, speed: Speed) -> str:
    """Return the first algorithm of `COSTS` whose cost is within 5% of the lowest."""
    costs = {name: cost(num_ranks, nbytes, speed) for name, cost in COSTS.items()}
    least = min(costs.values())
    return next(name for name, cost in costs.items() if cost <= ABOUT * least)


def by_slice(
    num_hosts: int, per_host: int, nbytes: float, link: Speed, inside: Speed, over_hosts: Cost
) -> float:
    """Return the seconds of an allreduce by slice, for hosts with several workers each.

    The workers of a host sum inside it, each one slice of the tensor; over the hosts each slice is
    reduced by the algorithm `over_hosts` on a lane of its own; then the slices are passed on inside
    the host. The lanes share the link, so it carries `nbytes` per host.
    """
    if not nbytes:
        return 0.0
    moved = 2 * (per_host - 1) / per_host * nbytes / inside.bandwidth
    return moved + 2 * (per_host - 1) * inside.latency + over_hosts(num_hosts, nbytes, link)


def flat_ring(
    num_hosts: int, per_host: int, nbytes: float, link: Speed, inside: Speed, messages: int = 1
) -> float:
    """Return the seconds of one ring through all workers of all hosts.

    It enters and leaves each host once, so the link carries all bytes, and every step is as slow as
    the slower of the two connections. messages: into how many each chunk is cut.
    """
    size = num_hosts * per_host
    if size == 1 or not nbytes:
        return 0.0
    bandwidth = inside.bandwidth if num_hosts == 1 else min(link.bandwidth, inside.bandwidth)
    crossings = num_hosts if num_hosts > 1 else 0
    latency = crossings * link.latency + (size - crossings) * inside.latency
    return 2 * (size - 1) / size * (nbytes / bandwidth + messages * latency)


def _pipelined(
    num_ranks: int, chunk: float, num_segments: int, first: float, speed: Speed
) -> float:
    """Return the seconds of a ring whose chunks travel in `num_segments` segments.

    `chunk` and `first` are the bytes of a chunk and of its first segment.
    """
    if num_ranks == 1 or not chunk:
        return 0.0
    wire = num_segments * speed.latency + chunk / speed.bandwidth
    of_wire = (num_ranks - 1) * (2 * wire + speed.combining(first))
    of_adding = (
        (num_ranks - 1) * speed.combining(chunk) + (num_ranks - 2) * wire + 2 * speed.moving(first)
    )
    return max(of_wire, of_adding)
