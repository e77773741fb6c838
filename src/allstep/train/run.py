"""A whole run, as each worker runs it: training with a validation per epoch, and one test at the end.

The test set is read once, after the last update; nothing is ever chosen by it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

import allstep.torch as hvd
from allstep import data
from allstep.data import ImageSet, Loader
from allstep.errors import AllstepError
from allstep.train import agree
from allstep.train.build import make_loaders, make_trainer, peak_rate
from allstep.train.config import RunConfig
from allstep.train.evaluate import Tally, evaluate
from allstep.train.loop import PHASES, Clock, Trainer, step
from allstep.train.prepare import find_data
from allstep.train.watch import EpochEnd, Opening, Progress, Result, Score, Watcher
from allstep.world import World


@dataclass(frozen=True)
class _Job:
    """The parts of a run, put together."""

    config: RunConfig
    world: World
    trainer: Trainer
    loaders: Mapping[str, Loader]
    watchers: Sequence[Watcher]


def train(config: RunConfig, world: World, out: Path, watchers: Sequence[Watcher] = ()) -> Result:
    """Trains as `config` says, on all ranks of `world`. `watchers` are told how it goes; only rank 0 needs any."""
    hvd.init()
    config = config.resolved(world.size)
    found, images = _data_on_every_host(config, world)
    loaders = make_loaders(config, images, world, out)
    trainer = make_trainer(config, images, loaders["train"].num_samples)
    job = _Job(config, world, trainer, loaders, watchers)
    opening = _opening(job, found, images, out)
    for watcher in watchers:
        watcher.start(opening)
    result = _run(job, out)
    for watcher in watchers:
        watcher.end(result)
    return result


def _run(job: _Job, out: Path) -> Result:
    started = time.perf_counter()
    ends = [_epoch(job, epoch) for epoch in range(job.config.epochs)]
    test = evaluate(job.trainer.net, job.loaders["test"], job.trainer.to_input)
    seconds = time.perf_counter() - started
    training = sum(end.seconds for end in ends)
    speed = job.loaders["train"].num_samples * len(ends) / training
    return Result(test, ends[-1].validation, speed, training / len(ends), seconds, out, _num_bad(job))


def _epoch(job: _Job, epoch: int) -> EpochEnd:
    loader = job.loaders["train"]
    first, last = epoch * loader.num_samples, (epoch + 1) * loader.num_samples
    started = time.perf_counter()
    clock, part, whole = Clock(), Tally(), Tally()
    for number, batch in enumerate(loader.batches(first, last), start=1):
        part = part + step(job.trainer, batch, clock)
        seen = min(batch.position + loader.batch, last)
        if number % job.config.log_every == 0 or seen == last:
            whole = whole + _report(job, epoch, seen, part, clock)
            part = Tally()
            clock.restart()
    seconds = time.perf_counter() - started
    validation = evaluate(job.trainer.net, job.loaders["validation"], job.trainer.to_input)
    end = EpochEnd(epoch, last, whole.score(), validation, seconds, _num_bad(job))
    for watcher in job.watchers:
        watcher.epoch(end)
    return end


def _num_bad(job: _Job) -> int:
    """Samples that were skipped so far, by all ranks; one that two ranks met, in different epochs, counts twice."""
    mine = sum(loader.num_bad for loader in job.loaders.values())
    return sum(agree.gather(job.world, mine))


def _report(job: _Job, epoch: int, seen: int, mine: Tally, clock: Clock) -> Tally:
    """Tells the watchers what all ranks did since the last report; the tally of it."""
    by_rank = agree.gather(job.world, (mine, clock.seconds))
    total = sum((tally for tally, _ in by_rank), Tally())
    score = total.score()
    rate = job.trainer.optimizer.param_groups[0]["lr"]
    _check_finite(score, seen, rate)
    seconds = sum(clock.seconds.values())
    times = {phase: [spent[phase] for _, spent in by_rank] for phase in PHASES}
    speed = score.count / seconds
    progress = Progress(epoch, seen, score.loss, score.accuracy, rate, seconds, speed, times)
    for watcher in job.watchers:
        watcher.progress(progress)
    return total


def _check_finite(score: Score, seen: int, rate: float) -> None:
    if not score.loss < float("inf"):
        raise AllstepError(
            f"the loss is {score.loss} after {seen} samples, at rate {rate:g}: a lower optimizer.lr may help"
        )


def _data_on_every_host(config: RunConfig, world: World) -> tuple[data.Found, ImageSet]:
    """One rank of each host looks for the data first, so that what must be downloaded is downloaded once."""
    agree.everyone(world, lambda: find_data(config) if world.local_rank == 0 else None)
    found = agree.everyone(world, lambda: find_data(config))
    return found, agree.everyone(world, lambda: data.load(found))


def _opening(job: _Job, found: data.Found, images: ImageSet, out: Path) -> Opening:
    parameters = list(job.trainer.net.parameters())
    device = parameters[0].device
    places = agree.gather(job.world, (job.world.host, torch.get_num_threads()))
    return Opening(
        config=job.config,
        world=job.world,
        hosts=tuple(host for host, _ in places),
        threads=tuple(threads for _, threads in places),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        data=found.title,
        data_folder=found.folder,
        num_samples={part: loader.num_samples for part, loader in job.loaders.items()},
        peak_lr=peak_rate(job.config),
        parameters=sum(p.numel() for p in parameters),
        nbytes=sum(p.numel() * p.element_size() for p in parameters),
        flop_per_sample=_flop_per_sample(job.trainer, images) if job.watchers else 0,
        out=out,
    )


def _flop_per_sample(trainer: Trainer, images: ImageSet) -> int:
    """Floating-point operations of one sample, forward and backward, counted by torch; a multiply-add counts two."""
    picture = trainer.to_input(torch.from_numpy(images.train.images[:1].copy()))
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(trainer.net(picture).sum(), list(trainer.net.parameters()))
    return int(counter.get_total_flops())
