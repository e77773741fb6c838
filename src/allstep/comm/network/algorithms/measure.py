"""Measures a link's `Speed`, in a few milliseconds (25 for each pair at 1 Gbit/s), when a group is
made.

Neighbours play ping-pong: 0 with 1 and 2 with 3 and so on, then 1 with 2 and 3 with 4. A small
message there and back gives the latency. A large one, both ways at once as all algorithms use the
wire, gives the bandwidth; a first round fills TCP's window and empties the burst allowance of a
shaped link, and does not count. Each rank adds two blocks that fit into its cache.

Of each the quickest round counts. A step of a collective ends when its slowest rank is through, so
all take the slowest figures: agreed through `tree`, same bits on all.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from allstep.comm.network.algorithms import tree
from allstep.comm.network.algorithms.exchange import Exchange, wait_for
from allstep.comm.network.algorithms.speed import Speed

SMALL, LARGE, BLOCK = 8, 1 << 20, 256 << 10  # bytes
SMALL_ROUNDS, LARGE_ROUNDS, ADDING_ROUNDS = 10, 2, 5


def measure_speed(exchange: Exchange) -> Speed:
    """The same on all ranks.

    Call it on all of them at once. One rank alone has a link that costs nothing.
    """
    latency, moving, adding = 0.0, 0.0, _seconds_to_add() / BLOCK
    for peer in _neighbours(exchange):
        latency = max(latency, _one_way(exchange, peer))
        moving = max(moving, (_both_ways(exchange, peer) - latency) / LARGE)
    slowest = torch.tensor([latency, moving, adding], dtype=torch.float64)
    tree.run(exchange, slowest, torch.maximum)
    latency, moving, adding = slowest.tolist()
    return Speed(latency, 1 / moving if moving > 0 else float("inf"), 1 / adding)


def _neighbours(exchange: Exchange) -> list[int]:
    """With whom we play, in this order: the even ranks begin with their right neighbour, the odd
    with their left."""
    left, right = exchange.rank - 1, exchange.rank + 1
    order = [right, left] if exchange.rank % 2 == 0 else [left, right]
    return [peer for peer in order if 0 <= peer < exchange.size]


def _one_way(exchange: Exchange, peer: int) -> float:
    """Seconds: half of the quickest there-and-back. A busy processor only makes it longer."""
    ball = torch.zeros(SMALL, dtype=torch.uint8)
    play = _there_and_back if exchange.rank < peer else _back
    return min(_timed(lambda: play(exchange, peer, ball)) for _ in range(SMALL_ROUNDS)) / 2


def _there_and_back(exchange: Exchange, peer: int, ball: Tensor) -> None:
    coming = exchange.recv(ball, peer)
    exchange.send(ball, peer).wait()
    coming.wait()


def _back(exchange: Exchange, peer: int, ball: Tensor) -> None:
    exchange.recv(ball, peer).wait()
    exchange.send(ball, peer).wait()


def _both_ways(exchange: Exchange, peer: int) -> float:
    going, coming = torch.zeros(2, LARGE, dtype=torch.uint8)

    def swap() -> None:
        wait_for([exchange.recv(coming, peer), exchange.send(going, peer)])

    swap()
    return min(_timed(swap) for _ in range(LARGE_ROUNDS))


def _seconds_to_add() -> float:
    block, other = torch.zeros(2, BLOCK // 4)
    return min(_timed(lambda: torch.add(block, other, out=block)) for _ in range(ADDING_ROUNDS))


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
