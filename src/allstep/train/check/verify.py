"""The work of each worker for `allstep verify`: a few real steps in float64, and an evaluation.

```
                     gradient of each step          weights after the last   losses, evaluation
reference            gradient-1.safetensors, ...    weights.safetensors      answer-1.json
any other number     compared at each step          compared                 answer-2.json
```

The steps are those of `train.step.step`; the mean gradient is read between its reduction and its
update. With `share_weights` each rank has only the mean of its own slices, so these are put
together first. Only rank 0 compares and writes: the gradients of five steps of a large model are
gigabytes, stored once on the disk, and never in memory all at once. `compare` has the tables.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from allstep import comm, norm
from allstep.comm.group import agree
from allstep.data import Batch
from allstep.errors import AllstepError
from allstep.norm import SyncBatchNorm
from allstep.train.check.compare_workers import (
    Answer,
    Compared,
    Difference,
    Plan,
    Step,
    read_plan,
    write_answer,
)
from allstep.train.checkpoint.write_and_read import Tensors
from allstep.train.config.check_sync import synchronous
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.health.compare_weights import Fingerprint
from allstep.train.input.splits import make_loaders
from allstep.train.run.placed_job import Job
from allstep.train.run.setup import make_job
from allstep.train.score.evaluate import evaluate
from allstep.train.step.after_step import StepReport
from allstep.train.step.running_statistics import RunningStatistics
from allstep.train.step.step import Clock, step
from allstep.train.watch.events import Score
from allstep.world import World

_FLOOR = 1e-3
"""Fraction of the size of all tensors below which a tensor may be zero except for rounding."""


def work(config: ResolvedConfig, folder: Path, launcher: str | None = None) -> None:
    """Run the plan in `folder` in a worker; rank 0 writes the answer there.

    The first number of workers that runs is the reference.
    """
    world = comm.init(launcher)
    answer = run(config, world, folder)
    if world.rank == 0:
        write_answer(folder, answer)
    comm.shutdown()


def run(config: ResolvedConfig, world: World, folder: Path) -> Answer:
    """Run the steps of the plan in `folder` on all ranks of `world`, and return the answer."""
    plan = read_plan(folder)
    job = make_job(synchronous(config), world, folder)
    notes = make_exact(job)
    reference = _Reference(folder, plan.tolerance, writes=world.rank == 0)
    steps = tuple(_steps(job, plan, reference))
    alike = _alike(job, len(steps))
    weights = reference.enter("weights", dict(job.trainer.model.state_dict()))
    score = _evaluate(job, plan.evaluated)
    reference.close()
    return Answer(
        workers=world.size,
        steps=steps,
        weights=weights,
        loss=score.loss,
        metrics=dict(score.metrics),
        percent=job.trainer.task.figures().percent,
        count=score.count,
        alike=alike,
        notes=tuple(notes),
    )


def make_exact(job: Job) -> list[str]:
    """Remove from the model what depends on the number of workers, and return notes.

    Dropout is only switched off, so it has no note.
    """
    model, notes = job.trainer.model, []
    switch_dropout_off(model)
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    own = [layer for layer in norms if not isinstance(layer, SyncBatchNorm)]
    if own and own[0] is not model:
        norm.convert(model, sync=True)
        job.after_step.statistics = RunningStatistics(model)
        notes.append(
            f"the model has {len(own)} batch norm{'s' if len(own) > 1 else ''} of its own, over the"
            " samples of one worker; verified with synchronized ones instead"
        )
    if norms and job.config.accumulation > 1:
        job.set_num_micro_batches(1)
        notes.append(
            f"accumulation={job.config.accumulation}: batch norms see one micro-batch at a time,"
            " whose samples depend on the number of workers; verified without"
        )
    return notes


def switch_dropout_off(model: nn.Module) -> int:
    """Set p of all dropout layers to 0, and return how many there were."""
    count = 0
    for layer in model.modules():
        if isinstance(layer, _DropoutNd) and layer.p:
            layer.p, count = 0.0, count + 1
        elif isinstance(layer, nn.MultiheadAttention) and layer.dropout:
            layer.dropout, count = 0.0, count + 1
    return count


# Steps


def _steps(job: Job, plan: Plan, reference: "_Reference") -> Iterator[Step]:
    """Take the steps of the plan and yield their losses and gradients."""
    trainer, clock = job.trainer, Clock()
    gradient: dict[str, Tensor] = {}
    # `Any`, because a method of the object is replaced.
    optimizer: Any = trainer.optimizer
    apply = optimizer.apply

    def record_and_apply() -> None:
        gradient.update(mean_gradients(trainer.model, trainer.optimizer))
        apply()

    optimizer.apply = record_and_apply
    for number, batch in enumerate(_batches(job, plan.batches), 1):
        agree.everyone(job.world, partial(trainer.task.check_targets, batch, job.loaders["train"]))
        mine = step(trainer, batch, sum(agree.gather(job.world, batch.weight)), clock)
        total = job.after_step.exchange(StepReport(mine, batch.weight)).tally
        if job.ema is not None:
            job.ema.update()
        yield Step(
            loss=total.score().loss, gradient=reference.enter(f"gradient-{number}", gradient)
        )
        gradient.clear()
    del optimizer.apply


def _batches(job: Job, sizes: tuple[int, ...]) -> Iterator[Batch]:
    """Yield batches of these sizes, truncated at the end of an epoch."""
    loader = job.loaders["train"]
    loader.batch = sizes[0]
    batches = loader.batches(0, sum(sizes) + len(sizes) * loader.num_samples)
    for following in (*sizes[1:], sizes[-1]):
        batch = next(batches)
        loader.batch = following
        yield batch
    # It is a generator, though its type is Iterator.
    batches.close()  # type: ignore[attr-defined]


@torch.no_grad()
def mean_gradients(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return copies of the gradients that the update will use, by name.

    All ranks call it together, after `reduce_gradients`.
    """
    shared = optimizer.owners
    if shared is None:
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        gradients = [(name, each.grad) for name, each in trained]
        return {name: each.to_dense().clone() for name, each in gradients if each is not None}
    together = {name: torch.zeros_like(parameter) for name, parameter in shared.named}
    for span in shared.own_ranges if shared.owns_first else ():
        name, parameter = shared.named[span.number]
        if parameter.grad is not None:
            laid_out = _in_memory(torch.empty_like(parameter).copy_(parameter.grad))
            _in_memory(together[name])[span.start : span.end] = laid_out[span.start : span.end]
    for tensor in together.values():
        dist.all_reduce(_in_memory(tensor))
    return together


def _in_memory(tensor: Tensor) -> Tensor:
    """Return a flat view in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _alike(job: Job, step: int) -> str:
    """Return how the weights of the ranks differ; "" if they do not."""
    fingerprint = Fingerprint(job.trainer.model, job.world, shared=job.shares_weights)
    fingerprint.start(step)
    try:
        fingerprint.finish()
    except AllstepError as error:
        return str(error)
    return ""


def _evaluate(job: Job, count: int) -> Score:
    """Return the score of the first `count` samples of the validation split."""
    splits = replace(job.splits, validation=job.splits.validation.first(count))
    loaders = make_loaders(
        job.config, splits, job.world, job.out, next(job.trainer.model.parameters()).device
    )
    return evaluate(
        job.evaluated_model,
        loaders["validation"],
        job.trainer.to_input,
        job.trainer.task,
        flip=job.config.evaluation.flip,
    )


# Comparison


class _Reference:
    """Storage of the reference's tensors, and comparison of others with them.

    Only the rank with `writes` stores and compares.
    """

    def __init__(self, folder: Path, tolerance: float, writes: bool) -> None:
        self.folder, self.tolerance, self.is_open = folder, tolerance, writes
        self.is_reference = not (folder / "whole").exists()

    def enter(self, name: str, tensors: Tensors) -> Compared:
        """Store or compare tensors under a name; only rank 0's result counts."""
        if not self.is_open:
            return Compared(size=0.0)
        floating = {key: each.detach() for key, each in tensors.items() if each.is_floating_point()}
        path = self.folder / f"{name}.safetensors"
        if not self.is_reference:
            return compare(load_file(path), floating, self.tolerance)
        save_file({key: each.cpu().contiguous().clone() for key, each in floating.items()}, path)
        return Compared(size=size_of(floating.values()))

    def close(self) -> None:
        """Mark the reference as complete."""
        if self.is_open:
            (self.folder / "whole").touch()


def compare(reference: Tensors, found: Tensors, tolerance: float) -> Compared:
    """Compare each tensor of `found` with that of the same name in `reference`.

    The order is that of `found`, which is the order of the model.
    """
    floor = max(_FLOOR * size_of(reference.values()), 1e-300)
    names = dict.fromkeys([*found, *reference])
    differences = [_difference(name, reference, found, floor) for name in names]
    # NaN is beyond the tolerance, too.
    beyond = [each for each in differences if not each.relative <= tolerance]
    return Compared(
        size=size_of(found.values()),
        worst=max(differences, key=_badness, default=None),
        first=beyond[0] if beyond else None,
        beyond=len(beyond),
        of=len(differences),
    )


def _badness(difference: Difference) -> tuple[bool, float]:
    """Return a key for sorting by difference, NaN last."""
    return math.isnan(difference.relative), difference.relative


def _difference(name: str, reference: Tensors, found: Tensors, floor: float) -> Difference:
    """Return the difference of one tensor.

    A tensor that one side does not have counts as zeros, such as the gradient of an unused
    parameter.
    """
    some = found[name].cpu() if name in found else reference[name]
    theirs, ours = (
        each[name].cpu() if name in each else torch.zeros_like(some) for each in (reference, found)
    )
    size, apart = size_of([theirs]), size_of([ours - theirs])
    relative = apart / max(size, floor)
    return Difference(
        tensor=name,
        shape=tuple(some.shape),
        relative=relative,
        reference=size,
        found=size_of([ours]),
    )


def size_of(tensors: Iterable[Tensor]) -> float:
    """Return the root of the mean square of all elements."""
    squares, count = 0.0, 0
    for tensor in tensors:
        squares, count = squares + float(tensor.double().square().sum()), count + tensor.numel()
    return float((squares / max(1, count)) ** 0.5)
