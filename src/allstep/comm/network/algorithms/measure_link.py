"""Measures the `Speed` of a link in a few milliseconds (25 for each pair at 1 Gbit/s).

Neighbors exchange messages in pairs: 0 with 1, 2 with 3 and so on, then 1 with 2, 3 with 4. A small
message there and back gives the latency. A large one, in both directions at once as all algorithms
use the link, gives the bandwidth; a first round fills TCP's window and uses up the burst allowance
of a shaped link, and does not count. Each rank adds two blocks that fit into its cache.

Of each measurement the fastest round counts. A step of a collective ends when its slowest rank has
finished, so all ranks use the slowest figures: agreed through `tree`, with the same bits on all.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from allstep.comm.network.algorithms import tree
from allstep.comm.network.algorithms.point_to_point import Exchange, wait_for
from allstep.costs.speed import Speed

SMALL, LARGE, BLOCK = 8, 1 << 20, 256 << 10  # bytes
SMALL_ROUNDS, LARGE_ROUNDS, ADDING_ROUNDS = 10, 2, 5


def measure_speed(exchange: Exchange) -> Speed:
    """Return the speed of the slowest link, the same on all ranks; all ranks call it together.

    One rank alone gets a link without cost.
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
    """Return the peers to measure with, in order.

    Even ranks begin with their right neighbor, odd ranks with their left.
    """
    left, right = exchange.rank - 1, exchange.rank + 1
    order = [right, left] if exchange.rank % 2 == 0 else [left, right]
    return [peer for peer in order if 0 <= peer < exchange.size]


def _one_way(exchange: Exchange, peer: int) -> float:
    """Return seconds: half of the fastest round trip. A busy processor only makes it longer."""
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
