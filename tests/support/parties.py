"""Parties that train a small model on shared weights, and what a test needs to check them.

`Party` makes the model, shares it and trains rounds; `Party.replay` computes the same in one
process. Gradients depend on weights and samples only.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from allstep.comm.group.init import group_for
from allstep.kvstore.training import (
    Claim,
    Options,
    Push,
    SharedModel,
    SyncPoint,
    replay,
    share_model,
)
from allstep.optim import LARS
from allstep.parallel.exchange import Named, Rule
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import ReplicatedOptimizer, replicate
from allstep.parallel.sync_mode import sync_mode

EPOCH, BATCH = 60, 12


class Small(nn.Module):
    """Two layers; with `width` 1200 the weights are three units of an elementwise optimizer.

    One parameter is never used; one in every second step, if `has_rare`.
    """

    def __init__(self, width: int = 8, has_rare: bool = True) -> None:
        super().__init__()
        self.has_rare = has_rare
        self.first, self.second = nn.Linear(600, width), nn.Linear(width, 3)
        self.norm = nn.BatchNorm1d(width)
        self.rare, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(7))

    def forward(self, data: Tensor, is_used: bool) -> Tensor:
        hidden = self.first(data)
        # A single sample has no batch statistics.
        hidden = self.norm(hidden) if len(data) > 1 else hidden
        out = self.second(torch.tanh(hidden))
        return out * self.rare if is_used else out


def named(model: nn.Module) -> list[Named]:
    return [Named(name, each) for name, each in model.named_parameters()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "lars": lambda p: LARS(p, lr=0.5, momentum=0.9, weight_decay=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def gradients(model: Small, claim: Claim) -> None:
    """Leave the gradient of the mean loss over the samples of a claim."""
    model.zero_grad()
    draws = torch.Generator().manual_seed(claim.start % EPOCH)
    data = torch.randn(claim.count, 600, generator=draws)
    target = torch.randint(3, (claim.count,), generator=draws)
    is_used = not model.has_rare or claim.start // 4 % 2 == 0
    nn.functional.cross_entropy(model(data, is_used), target).backward()


def lr(position: int) -> float:
    """A factor of the learning rate."""
    return 1 / (1 + position / 100)


@dataclass
class Party:
    """One party. sync, optimizer: the mode and an entry of OPTIMIZERS. sleeps: seconds at most."""

    sync: str = "async"
    optimizer: str = "sgd"
    width: int = 8
    sleeps: float = 0.0
    seed: int = 0
    ahead: int = 0
    has_rare: bool = True
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        self.model = Small(self.width, self.has_rare)
        self.options = Options(sync_mode(self.sync), EPOCH, **self.more)
        self.plain = OPTIMIZERS[self.optimizer](self.model.parameters())
        self.base_lr = self.plain.param_groups[0]["lr"]

    def share(self) -> SharedModel:
        buffers = [each for each in self.model.buffers() if each.is_floating_point()]
        self.made = self._replicated()
        self.shared = share_model(self.made, type(self.plain), self.options, buffers)
        self.draws = random.Random(self.seed * 1000 + self.shared.rank)
        return self.shared

    def _replicated(self) -> ReplicatedOptimizer:
        replicas = Replicas(
            named(self.model), lambda: group_for("gradients"), lambda: "test", Rule()
        )
        return replicate(self.plain, replicas, 1)

    def step(self, claim: Claim, before: Callable[[Claim], None]) -> Push | None:
        self.shared.begin(claim)
        before(claim)
        gradients(self.model, claim)
        if self.sleeps:
            time.sleep(self.draws.uniform(0, self.sleeps))
        self.made.reduce_gradients()
        self.made.param_groups[0]["lr"] = self.base_lr * lr(claim.start)
        self.made.apply()
        return self.shared.last_push

    def round(
        self, position: int, limit: int, before: Callable[[Claim], None] = lambda claim: None
    ) -> SyncPoint:
        """Train one round. before: called before each step."""
        self.shared.begin_round(position, limit, BATCH)
        while True:
            for claim in self.claims():
                self.step(claim, before)
            point = self.shared.synchronize([self.shared.rank])
            if point is not None:
                return point

    def claims(self) -> Iterator[Claim]:
        """The claims of a round, of which `ahead` are taken before they are needed."""
        taken = list[Claim]()
        while True:
            while len(taken) <= self.ahead and (claim := self.shared.claims.next()) is not None:
                taken.append(claim)
            if not taken:
                return
            yield taken.pop(0)

    def weights(self) -> dict[str, Tensor]:
        """Weights and the optimizer's state, in plain tensors."""
        found = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        state = (self.made if hasattr(self, "made") else self.plain).state_dict()["state"]
        for number, values in state.items():
            for key, value in values.items():
                found[f"{number}.{key}"] = torch.as_tensor(value).clone()
        return found

    def replay(self, pushes: list[Push]) -> Push | None:
        """Repeat pushes in this process, on the weights of the start."""

        def compute(claim: Claim) -> None:
            gradients(self.model, claim)

        return replay(
            self.plain, type(self.plain), named(self.model), pushes, compute, self.options
        )


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether all tensors are equal bit by bit."""
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def missed(pushes: list[Push], position: int) -> set[int]:
    """The positions up to `position` that were not pushed completely exactly once."""
    counts = [0] * position
    for push in pushes:
        if not push.is_torn:
            for at in range(push.start, push.start + push.count):
                counts[at] += 1
    return {at for at, count in enumerate(counts) if count != 1}
