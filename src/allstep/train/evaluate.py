"""Evaluation: every sample counts once, over all ranks, however many there are.

Each rank sums over its share; the sums and the counts are added over the ranks, and only then divided. No sample is padded or repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from allstep.data import Batch, Loader
from allstep.train.watch import Score

ToInput = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Tally:
    """Sums over samples. Adding tallies of disjoint samples gives the tally of them all."""

    loss: float = 0.0
    correct: float = 0.0
    count: float = 0.0

    def add(self, loss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor) -> None:
        """Counts some samples, given the sum of their losses."""
        self.loss += loss.item()
        self.correct += (logits.argmax(1) == target).sum().item()
        self.count += len(target)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.loss + other.loss, self.correct + other.correct, self.count + other.count)

    def score(self) -> Score:
        """The means; of no samples they are 0."""
        count = max(1.0, self.count)
        return Score(self.loss / count, self.correct / count, round(self.count))


@torch.no_grad()
def evaluate(net: nn.Module, loader: Loader, to_input: ToInput) -> Score:
    """The net's score on all samples of `loader`, the shares of all ranks together."""
    net.eval()
    mine = Tally()
    for batch in loader.batches():
        if batch.weight:
            _count(net, batch, to_input, mine)
    net.train()
    return all_ranks(mine).score()


def all_ranks(mine: Tally) -> Tally:
    """The sum of all ranks' tallies."""
    sums = torch.tensor([mine.loss, mine.correct, mine.count], dtype=torch.float64)
    dist.all_reduce(sums)
    return Tally(*sums.tolist())


def _count(net: nn.Module, batch: Batch, to_input: ToInput, tally: Tally) -> None:
    pictures = to_input(batch.data)
    target = batch.target.to(pictures.device)
    logits = net(pictures)
    tally.add(functional.cross_entropy(logits, target, reduction="sum"), logits, target)
