"""Replay of an asynchronous run: its weights again, in one process, from its order log (D19).

```
order.jsonl ──> rounds: pushes in the order in which they were applied
initial weights, or a checkpoint ──> gradient at the weights that the party had read ──> update
                                     ... ──> compared with a checkpoint, bit by bit
```

A gradient has the same bits because it is computed from the same weights, samples, random numbers
and number of threads. Running statistics are those of each party within a round, and averaged by
samples at its end, as in the run. A push that was torn by a kill cannot be repeated; replay stops
there and names it.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from allstep.data import Batch
from allstep.data.order import even
from allstep.errors import CheckpointError, ConfigError
from allstep.kvstore.training import Claim, Push, replay
from allstep.train.checkpoint import optimizer_state
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.names import name_of
from allstep.train.checkpoint.restore import optimizer_tensors, parameter_names
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.config.sync_config import SyncConfig
from allstep.train.folder import order_file
from allstep.train.folder.existing_run import run_config
from allstep.train.folder.order_file import LoggedRound
from allstep.train.run.placed_job import Job
from allstep.train.run.setup import make_job
from allstep.train.step import build
from allstep.train.step.pushing import options_of
from allstep.train.step.running_statistics import PartyStatistics
from allstep.train.step.step import Clock, reduce_step
from allstep.world import World


@dataclass(frozen=True)
class Replayed:
    """The outcome of a replay."""

    begin: int
    """Samples of the run at which it began."""
    end: int
    """Samples of the checkpoint with which it was compared."""
    rounds: int
    pushes: int
    parties: int
    seconds: float
    num_tensors: int
    """Tensors that were compared: weights, buffers and the optimizer's state."""
    different: Mapping[str, float] = field(default_factory=dict)
    """The largest difference of each tensor that is not equal."""
    torn: str = ""
    """The push that could not be repeated, if there is one; nothing was compared then."""

    @property
    def is_equal(self) -> bool:
        """Whether all weights are equal bit by bit."""
        return not self.different and not self.torn


def replay_run(folder: Path, trust: bool = False) -> Replayed:
    """Recompute the run in `folder` up to its newest checkpoint, and compare.

    Raise ConfigError or CheckpointError if it cannot be replayed. `trust`: see `run_config`.
    """
    config = run_config(folder, trust=trust).resolved(1)
    rounds = _rounds(folder, config)
    last = checkpoint.newest(folder / "checkpoints").snapshot
    if last is None:
        raise CheckpointError(f"{folder}: has no complete checkpoint to compare with")
    rounds = [each for each in rounds if each.end <= last.samples]
    chain = _chain(rounds, last.samples, folder)
    started = time.perf_counter()
    begin = chain[0].begin
    first = None if begin == 0 else checkpoint.read(folder / "checkpoints" / name_of(begin))
    again = _Replay(config, last, first)
    torn = next(filter(None, map(again.repeat, chain)), None)
    parties = {push[0] for each in chain for push in each.pushes}
    return Replayed(
        begin,
        last.samples,
        len(chain),
        sum(len(each.pushes) for each in chain),
        len(parties),
        time.perf_counter() - started,
        len(last.weights) + len(optimizer_tensors(last)),
        {} if torn else again.differences(last),
        _named(torn) if torn else "",
    )


def _rounds(folder: Path, config: ResolvedConfig) -> list[LoggedRound]:
    mode = config.sync.name
    if config.sync.mode.has_equal_steps:
        raise ConfigError(
            f"{folder}: a run with sync={mode} has no order log; its steps have one order, so that"
            f" training again from {folder / 'config.yaml'} repeats them"
        )
    if config.sync.mode.name == "elastic":
        raise ConfigError(
            f"{folder}: a run with sync={mode} cannot be replayed: the order log has the moves of"
            " the workers, and not the learning rate of each step in between; modes that can be"
            " replayed: async, stale:S, clock:S, lazy:K"
        )
    if not (rounds := order_file.read(folder)):
        raise ConfigError(
            f"{folder}: there is no order log ({order_file.ORDER_LOG}), or no complete round in it;"
            f" a run with sync={mode} writes it into its run folder at each synchronization point"
        )
    return rounds


def _chain(rounds: Sequence[LoggedRound], end: int, folder: Path) -> list[LoggedRound]:
    """Return the rounds up to `end` without a gap, from the start of the run or a checkpoint on."""
    chain: list[LoggedRound] = []
    for each in reversed(rounds):
        if each.end != (chain[0].begin if chain else end):
            break
        chain.insert(0, each)
    if not chain:
        raise ConfigError(
            f"{folder}: the order log has no round that ends at sample {end:,}, that of the newest"
            " checkpoint; it was not written completely"
        )
    kept = {path.name for path in checkpoint.written(folder / "checkpoints")}
    while chain and chain[0].begin and name_of(chain[0].begin) not in kept:
        chain.pop(0)
    if not chain:
        raise ConfigError(
            f"{folder}: the order log does not reach back to the start of the run, nor to a"
            " checkpoint before the newest one; it was not written completely"
        )
    return chain


def _set_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _named(push: Push) -> str:
    return (
        f"push {push.made} of party {push.party} (samples {push.start:,} to"
        f" {push.start + push.count:,}) was torn by a kill"
    )


class _Replay:
    """The state of a run that is recomputed, between two rounds."""

    def __init__(self, config: ResolvedConfig, last: Snapshot, first: Snapshot | None) -> None:
        chosen = {
            "sync": SyncConfig(),
            "precision": last.state["precision"]["name"],
            "execution": last.state["execution"],
        }
        self._config = config
        self._job: Job = make_job(config.model_copy(update=chosen), World.alone(), None, first)
        self._kind = type(build.make_optimizer(config, self._job.trainer.model))
        self._named = self._job.trainer.optimizer._replicas.named
        self._options = options_of(config, self._job.num_train)

    def repeat(self, entry: LoggedRound) -> Push | None:
        """Repeat the pushes of a round. Return one that cannot be repeated, if there is one."""
        job = self._job
        self._set_batch(entry)
        pushes = [Push(*fields) for fields in entry.pushes]
        statistics = PartyStatistics(job.trainer.model)
        with closing(self._batches(pushes, entry.batch)) as batches:
            party_of = {claim: push.party for push in pushes for claim in push.claims}

            def gradients(claim: Claim) -> bool:
                party = party_of[claim]
                statistics.enter(party)
                # As many threads add in the same order. A party that was lost is as the others.
                _set_threads(entry.threads.get(party, max(entry.threads.values(), default=1)))
                return self._compute(next(batches), claim)

            torn = replay(
                job.trainer.optimizer, self._kind, self._named, pushes, gradients, self._options
            )
        if len(entry.samples) > 1:
            statistics.average(entry.samples)
        return torn

    def _set_batch(self, entry: LoggedRound) -> None:
        """Set the micro-batches of the round's batch, which may have grown."""
        job, config = self._job, self._config
        job.progress.samples, job.progress.batch = entry.begin, entry.batch
        count, weights = config.accumulation, even(max(1, len(entry.samples)))
        if entry.batch != config.batch:
            count = job.growth.num_micro_batches(entry.batch, weights, count)
        job.set_num_micro_batches(count)

    def _batches(self, pushes: Sequence[Push], batch: int) -> Generator[Batch]:
        claims = ((claim.start, claim.count) for push in pushes for claim in push.claims)
        return self._job.loaders["train"].claimed(claims, batch)

    def _compute(self, batch: Batch, claim: Claim) -> bool:
        trainer = self._job.trainer
        reduce_step(trainer, batch, claim.count, Clock())
        trainer.optimizer.discard()
        return batch.weight > 0

    def differences(self, last: Snapshot) -> dict[str, float]:
        """Return the largest difference of each tensor that is not that of the checkpoint."""
        state = self._job.trainer.optimizer.state_dict()
        tensors, _ = optimizer_state.flatten(state, parameter_names(state))
        ours = {**self._job.trainer.model.state_dict(), **tensors}
        theirs = {**last.weights, **optimizer_tensors(last)}
        return {
            name: _difference(ours.get(name), tensor)
            for name, tensor in theirs.items()
            if name not in ours or not _is_same(ours[name], tensor)
        }


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours.detach().cpu(), theirs)


def _difference(ours: Tensor | None, theirs: Tensor) -> float:
    if ours is None or ours.shape != theirs.shape:
        return float("inf")
    return float((ours.detach().cpu().double() - theirs.double()).abs().max())
