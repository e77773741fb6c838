"""The opening event of a run: config, hosts, device, data, model size and operations per sample."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from allstep.comm.group import agree
from allstep.process.memory import resident_nbytes
from allstep.train.run.placed_job import Job
from allstep.train.score.evaluate import evaluating
from allstep.train.step.learning_rate import peak_lr
from allstep.train.watch.events import Opening


def opening(job: Job, with_flop: bool = True) -> Opening:
    """Return the opening event of the run. A collective.

    `with_flop` counts the operations per sample, which only ranks with callbacks need.
    """
    parameters = list(job.trainer.model.parameters())
    device = parameters[0].device
    places = agree.gather(job.world, (job.world.host, torch.get_num_threads()))
    return Opening(
        config=job.config,
        world=job.world,
        hosts=tuple(host for host, _ in places),
        threads=tuple(threads for _, threads in places),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        data=job.splits.title,
        data_folder=job.splits.place,
        classes=job.splits.classes,
        num_samples={split: loader.num_samples for split, loader in job.loaders.items()},
        peak_lr=peak_lr(job.config),
        parameters=sum(p.numel() for p in parameters),
        nbytes=sum(p.numel() * p.element_size() for p in parameters),
        flop_per_sample=_flop_per_sample(job) if with_flop else 0,
        out=job.out,
        execution=job.execution,
        precision=job.trainer.precision.name,
        precision_why=job.trainer.precision.why,
        share_weights=job.shares_weights,
        undo_nbytes=_undo_nbytes(job),
        num_owners=0 if (owners := job.trainer.optimizer.owners) is None else owners.num_owners,
        position=job.progress.samples,
        num_unused=job.splits.num_unused,
        notes=tuple(job.notes),
    )


def _undo_nbytes(job: Job) -> int:
    """Return the bytes of weights in the undo copy of an update; 0 without one."""
    if not (job.is_elastic and job.shares_weights and job.world.size > 1):
        return 0
    parameters = job.trainer.model.parameters()
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)


def _flop_per_sample(job: Job) -> int:
    """Return the floating-point operations of one sample, forward and backward.

    Return 0 if the model does not accept a single sample.
    """
    image = job.trainer.to_input(torch.zeros((1, *job.splits.shape), dtype=torch.uint8))
    try:
        return count_flop(job.trainer.model, image)
    # A user's model may raise anything, and the run does not depend on this figure.
    except Exception:
        return 0


def count_flop(model: nn.Module, images: Tensor) -> int:
    """Return the floating-point operations of forward and backward, as counted by torch.

    A multiply-add counts as two. The model is not changed.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # In evaluation mode: a batch norm cannot train on one sample, and its statistics must not
    # change.
    with evaluating(model), FlopCounterMode(display=False) as counter:
        torch.autograd.grad(model(images).sum(), trained, allow_unused=True)
    return int(counter.get_total_flops())


def memory_in_use() -> int:
    """Return the bytes that this process uses: on its GPU, else in main memory."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else resident_nbytes()
