"""Ranks as threads of one process, on a network that exists only as numbers: counts messages and
tells the time that they would take.

    run = simulate(4, lambda exchange, combine: ring.run(exchange, tensors[exchange.rank], combine), speed=Speed(...))
    run.seconds, run.ranks[0].num_sent, run.ranks[0].nbytes_sent, run.ranks[0].nbytes_added

The clock is the model of `allstep.comm.network.algorithms.speed`: a message of n bytes holds the
sender's way out and the receiver's way in for `speed.moving(n)` seconds; adding holds the rank.
Nothing is measured, so the same run always takes the same time.

The network is as unkind as the rules of `Exchange` allow: a message is read at the last moment,
when the receiver waits for it. If the sender has written over it by then, the test fails. So it
does when a message is not received, or a receive has another size.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from allstep.comm.network.algorithms import Speed

SECONDS = 60  # a rank that waits longer than that waits for ever
FREE = Speed(0.0, float("inf"), float("inf"))


@dataclass
class Sent:
    tensor: Tensor
    copy: Tensor
    arrives: float
    taken: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        assert self.taken.wait(SECONDS), "a message that nobody received"


class SimulatedExchange:
    """One rank."""

    def __init__(
        self,
        rank: int,
        size: int,
        speed: Speed,
        pipes: dict[tuple[int, int], "queue.SimpleQueue[Sent]"],
    ) -> None:
        self.rank, self.size, self.speed, self.pipes = rank, size, speed, pipes
        self.now = self.way_out_free = self.way_in_free = 0.0
        self.num_sent = self.nbytes_sent = self.nbytes_added = 0

    def send(self, tensor: Tensor, peer: int) -> Sent:
        assert tensor.numel() and peer != self.rank
        self.num_sent += 1
        self.nbytes_sent += tensor.nbytes
        self.way_out_free = max(self.now, self.way_out_free) + self.speed.moving(tensor.nbytes)
        sent = Sent(tensor, tensor.clone(), self.way_out_free)
        self.pipes[self.rank, peer].put(sent)
        return sent

    def recv(self, tensor: Tensor, peer: int) -> "Coming":
        assert tensor.numel() and peer != self.rank
        return Coming(self, tensor, peer)

    def combine(self, kind: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def timed(first: Tensor, second: Tensor, out: Tensor) -> Tensor:
            self.nbytes_added += out.nbytes
            self.now += self.speed.combining(out.nbytes)
            return kind(first, second, out=out)

        return timed


@dataclass
class Coming:
    exchange: SimulatedExchange
    tensor: Tensor
    peer: int

    def wait(self) -> None:
        us = self.exchange
        sent = us.pipes[self.peer, us.rank].get(timeout=SECONDS)
        assert sent.copy.numel() == self.tensor.numel()
        assert torch.equal(sent.tensor.view(torch.uint8), sent.copy.view(torch.uint8)), (
            "written over on its way"
        )
        self.tensor.copy_(sent.copy)
        us.way_in_free = max(sent.arrives, us.way_in_free + us.speed.moving(self.tensor.nbytes))
        us.now = max(us.now, us.way_in_free)
        sent.taken.set()


@dataclass(frozen=True)
class Run:
    ranks: list[SimulatedExchange]

    @property
    def seconds(self) -> float:
        return max(rank.now for rank in self.ranks)

    def total(self, what: str) -> int:
        return sum(getattr(rank, what) for rank in self.ranks)

    def most(self, what: str) -> int:
        return max(getattr(rank, what) for rank in self.ranks)


def simulate(size: int, work: Callable[[SimulatedExchange], Any], speed: Speed = FREE) -> Run:
    """Run `work` on every rank; raise what a rank raises, and fail when a message is left over."""
    pipes = {(a, b): queue.SimpleQueue[Sent]() for a in range(size) for b in range(size)}
    ranks = [SimulatedExchange(rank, size, speed, pipes) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        for outcome in [threads.submit(work, exchange) for exchange in ranks]:
            outcome.result()
    assert all(pipe.empty() for pipe in pipes.values()), "a message that nobody received"
    return Run(ranks)
