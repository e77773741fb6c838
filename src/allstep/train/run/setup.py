"""Build the components of a run on one rank: data, model, optimizer.

```
config ──> splits (data) ──> loaders
   │          │ shape, classes
   ├──────> model <── checkpoint, in a resumed run
   │          │ precision (if auto: chosen for this machine), execution (plain, channels-last,
   │          │ compiled)
   └──────> optimizer <── its state from the checkpoint
              │
            distributed over the ranks (`allstep.parallel`)
```
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from allstep.comm.group import agree
from allstep.compression import codec_from
from allstep.data import Loader
from allstep.optim import RunningNoiseScale
from allstep.parallel.replicated import ReplicatedOptimizer
from allstep.train.checkpoint.restore import averaged_weights, load_optimizer, load_weights
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.config.check_config import notes
from allstep.train.config.check_sync import check_hosts
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.health.checkpoint_state import check_batch
from allstep.train.health.divergence import LossWatch
from allstep.train.input.classes import check_same_classes
from allstep.train.input.splits import Splits, make_loaders, make_to_input, measure, open_splits
from allstep.train.precision.casting import cast
from allstep.train.precision.precision import Precision, dtype_of_weights
from allstep.train.run.placed_job import Job, place
from allstep.train.run.progress import RunProgress
from allstep.train.score.evaluate import ToInput
from allstep.train.step import build, pushing, sharing
from allstep.train.step import execution as executions
from allstep.train.step.batch_growth import Growth, grows, note
from allstep.train.step.ema import Average
from allstep.train.step.learning_rate import learning_rate
from allstep.train.step.micro_batch import memory_of_worker, samples_at_once
from allstep.train.step.precision_choice import SAMPLES, loss_in, settle, time_both
from allstep.train.step.step import Trainer, communicates
from allstep.train.step.timing import Example, Trial
from allstep.train.task.classification import Classification
from allstep.train.task.task import Task
from allstep.world import World

_IMAGES_TO_WHITEN = 5000
# The function that converts stored samples to the model's input, by the kind of a task's input.
_INPUTS = {"images": make_to_input}


def make_job(
    config: ResolvedConfig,
    world: World,
    out: Path | None,
    snapshot: Snapshot | None = None,
    worker: int | None = None,
) -> Job:
    """Build all components of a run. A collective.

    `out` is the run folder; None if it is not known yet, so that `Job.move_to` follows. With a
    `snapshot` the run resumes from it. `worker` is the number of this worker in an elastic run,
    None in a fixed world.
    """
    agree.everyone(world, lambda: check_hosts(config, world))
    splits = _data_on_every_host(config, world)
    device = build.make_device(config)
    loaders = make_loaders(config, splits, world, out, device, worker)
    num_train = loaders["train"].num_samples
    task = Classification(splits.num_classes, config.label_smoothing)
    progress = _progress(config, task, snapshot)
    if snapshot is not None:
        _check_data(snapshot, world, splits, loaders)
    made = _model(config, world, splits, out, device, task, snapshot)
    growth = _growth(config, num_train, made.room, snapshot)
    if snapshot is not None:
        check_batch(snapshot, config, num_train)
    optimizer = build.make_optimizer(config, made.model)
    if snapshot is not None:
        agree.everyone(world, lambda: load_optimizer(optimizer, snapshot))
    is_elastic = worker is not None
    share, replicated = _distributed(config, world, made.model, optimizer, device, is_elastic)
    job = Job(
        config=config,
        world=world,
        out=Path() if out is None else out,
        splits=splits,
        loaders=loaders,
        trainer=_trainer(config, task, made, replicated, num_train),
        progress=progress,
        growth=growth,
        watch=LossWatch() if snapshot is None else LossWatch(**snapshot.state["watch"]),
        ema=_average(config, made.model, snapshot),
        noise=_noise(config, world, snapshot),
        shares_weights=share,
        is_elastic=is_elastic,
        execution=made.execution,
        notes=[
            *splits.notes,
            *made.notes,
            *build.outer_note(replicated),
            *build.compress_note(config, snapshot is not None),
            *filter(None, [note(config)]),
            *notes(config, world.size, num_train),
            *pushing.unused_servers(config),
        ],
    )
    place(job, world)
    return job


def _distributed(
    config: ResolvedConfig,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    is_elastic: bool,
) -> tuple[bool, ReplicatedOptimizer]:
    """Return whether the workers of a host share weights, and the optimizer of this rank."""
    share = agree.everyone(
        world, lambda: build.shares_weights(config, world, model, device, is_elastic)
    )
    if not config.sync.mode.has_equal_steps:
        agree.everyone(world, lambda: _check_pushes(config, model, device))
        # Each party's gradients are its own.
        world = World.alone()
    averaging = build.make_averaging(config, model, optimizer, is_elastic)
    serves, codec = config.sync.mode.name == "server", codec_from(config.sync.compress)
    made = build.distribute(
        model, optimizer, world, config.accumulation, share, is_elastic, averaging, serves, codec
    )
    return share, made


def _check_pushes(config: ResolvedConfig, model: nn.Module, device: torch.device) -> None:
    together = any(communicates(layer) for layer in model.modules())
    pushing.check_pushes(config, device, layers_communicate=together)


def _check_data(
    snapshot: Snapshot, world: World, splits: Splits, loaders: Mapping[str, Loader]
) -> None:
    """Move the loader to the position of the checkpoint. Raise DataError if the data differs."""
    known = snapshot.state.get("pictures", {}).get("classes", ())
    agree.everyone(world, lambda: check_same_classes(splits.place, splits.classes, known))
    agree.everyone(world, lambda: loaders["train"].load_state_dict(dict(snapshot.state["loader"])))


@dataclass(frozen=True)
class _Model:
    """The model on this rank, with its input function, precision and execution mode."""

    model: nn.Module
    to_input: ToInput
    precision: Precision
    room: int
    """Samples that fit into memory at once, if the batch grows; else 0."""
    execution: str
    notes: tuple[str, ...]


def _model(
    config: ResolvedConfig,
    world: World,
    splits: Splits,
    out: Path | None,
    device: torch.device,
    task: Task,
    snapshot: Snapshot | None,
) -> _Model:
    """Build the model with equal weights on all ranks, and choose its precision and execution."""
    dtype = dtype_of_weights(config.precision)
    to_input = _INPUTS[task.input](
        splits.mean, splits.std, device, dtype, config.execution != "plain"
    )
    model = _build_model(config, world, splits, out, to_input, device, dtype, snapshot)
    share_of_batch = partial(_example, config, world, splits, to_input)
    precision, notes_on_it = _precision(config, world, device, model, share_of_batch, snapshot)
    needs_room = grows(config) and snapshot is None
    room = _room(world, splits, model, to_input, precision) if needs_room else 0
    chosen = _execution(
        config, world, model, len(splits.train), share_of_batch, precision, snapshot
    )
    return _Model(model, to_input, precision, room, chosen.name, (*chosen.notes, *notes_on_it))


def _trainer(
    config: ResolvedConfig,
    task: Task,
    made: _Model,
    optimizer: ReplicatedOptimizer,
    num_train: int,
) -> Trainer:
    """Return the trainer, which `place` completes with rank and size."""
    return Trainer(
        model=made.model,
        task=task,
        optimizer=optimizer,
        lr=learning_rate(config, num_train),
        to_input=made.to_input,
        precision=made.precision,
        clip=config.optimizer.clip,
        noise=build.make_noise(config),
        weigh=build.make_weigh(config),
        seed=config.seed,
    )


def _progress(config: ResolvedConfig, task: Task, snapshot: Snapshot | None) -> RunProgress:
    if snapshot is None:
        return RunProgress(batch=config.batch, since=task.tally())
    return RunProgress.from_plain(snapshot.state["standing"], task)


def _data_on_every_host(config: ResolvedConfig, world: World) -> Splits:
    """Open the data on all ranks. Return the splits with mean and std. A collective.

    One rank of each host opens the data first, so that it is downloaded and indexed only once.
    """
    agree.everyone(world, lambda: open_splits(config) if world.local_rank == 0 else None)
    splits = agree.everyone(world, lambda: open_splits(config))
    figures = agree.rank_0_decides(world, lambda: measure(splits))
    return replace(splits, mean=figures["mean"], std=figures["std"])


def _build_model(
    config: ResolvedConfig,
    world: World,
    splits: Splits,
    out: Path | None,
    to_input: ToInput,
    device: torch.device,
    dtype: torch.dtype,
    snapshot: Snapshot | None,
) -> nn.Module:
    """Return the model with equal weights on all ranks: those of rank 0, or of the checkpoint."""
    made = agree.everyone(world, lambda: build.build_model(config, splits))
    model = cast(made, device, dtype)
    if snapshot is not None:
        agree.everyone(world, lambda: load_weights(model, snapshot.weights))
    elif callable(whiten := getattr(model, "whiten", None)):
        whiten(to_input(_some_images(config, splits, out)))
    # A worker that has not joined its world yet has no group.
    for tensor in model.state_dict().values() if world.size > 1 else ():
        dist.broadcast(tensor, 0)
    return model


def _some_images(config: ResolvedConfig, splits: Splits, out: Path | None) -> torch.Tensor:
    """Return the first images of the validation split, prepared as for evaluation.

    They are the same with any number of workers.
    """
    loader = make_loaders(config, splits, World.alone(), out)["validation"]
    loader.batch = _IMAGES_TO_WHITEN
    return next(iter(loader.batches())).data


def _example(
    config: ResolvedConfig,
    world: World,
    splits: Splits,
    to_input: ToInput,
    max_samples: int = sys.maxsize,
) -> Example:
    """Return random input and targets with the size of a micro-batch, for timing.

    They have at most `max_samples` samples.
    """
    share = min(max_samples, -(-config.batch // (world.size * config.accumulation)))
    # A generator of its own, so that the random numbers of the run do not change.
    draws = torch.Generator().manual_seed(0)
    images = to_input(
        torch.randint(256, (max(2, share), *splits.shape), dtype=torch.uint8, generator=draws)
    )
    return images, torch.zeros(len(images), dtype=torch.int64, device=images.device)


def _precision(
    config: ResolvedConfig,
    world: World,
    device: torch.device,
    model: nn.Module,
    example: Callable[[int], Example],
    snapshot: Snapshot | None,
) -> tuple[Precision, tuple[str, ...]]:
    """Return the precision and notes on it.

    It is the config's, or with `auto` that of the checkpoint or of this machine.
    """
    state = {} if snapshot is None else snapshot.state["precision"]
    # Checkpoints from before `precision: auto` have no name; their config has one.
    kept = state.get("name")

    def timed() -> Mapping[str, Trial]:
        return time_both(model, example(SAMPLES), world, config.execution)

    settled = settle(config.precision, kept, world, device, timed)
    precision = Precision(settled.name, device, settled.why)
    if state:
        precision.load(state)
    return precision, settled.notes


def _execution(
    config: ResolvedConfig,
    world: World,
    model: nn.Module,
    num_train: int,
    example: Callable[[], Example],
    precision: Precision,
    snapshot: Snapshot | None,
) -> executions.Chosen:
    """Switch the model to the execution mode of the config, or to the fastest one for `auto`.

    A resumed run keeps the mode of its checkpoint.
    """
    loss_of = loss_in(precision)
    before = None if snapshot is None else str(snapshot.state["execution"])
    if config.execution != "auto" or before is not None:
        return executions.settle(model, example(), loss_of, world, before or config.execution)
    steps = config.num_epochs * num_train / config.batch
    return executions.choose(model, example(), loss_of, world, remaining_steps=steps)


def _average(config: ResolvedConfig, model: nn.Module, snapshot: Snapshot | None) -> Average | None:
    section = config.ema
    if section.decay is None:
        return None
    average = Average(model, section.decay, section.every)
    if snapshot is not None:
        average.load(averaged_weights(snapshot), snapshot.state["ema"]["updates"])
    return average


def _noise(
    config: ResolvedConfig, world: World, snapshot: Snapshot | None
) -> RunningNoiseScale | None:
    if not sharing.measures_noise(config):
        return None
    state = {} if snapshot is None else snapshot.state["noise"]
    return RunningNoiseScale(**state)


def _room(
    world: World, splits: Splits, model: nn.Module, to_input: ToInput, precision: Precision
) -> int:
    """Return the samples that fit into the memory of every worker at once. A collective.

    Called before the execution mode is set, so that the measurement does not compile the model.
    """

    def forward(model: nn.Module, count: int) -> torch.Tensor:
        with precision.autocast():
            output: torch.Tensor = model(
                to_input(torch.zeros((count, *splits.shape), dtype=torch.uint8))
            )
        return output

    mine = samples_at_once(model, forward, memory_of_worker(world, precision.device))
    return min(agree.gather(world, mine))


def _growth(config: ResolvedConfig, num_train: int, room: int, snapshot: Snapshot | None) -> Growth:
    growth = Growth(config.growth, config.batch, num_train, room)
    if snapshot is not None:
        growth.load(snapshot.state["growth"])
    return growth
