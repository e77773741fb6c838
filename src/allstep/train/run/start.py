"""What a run tells before its first step: who computes what, where, with how many operations."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from allstep.comm.group import agree
from allstep.process.memory import resident_nbytes
from allstep.train.run.setup import Job
from allstep.train.score.evaluate import evaluating
from allstep.train.step.learning_rate import peak_lr
from allstep.train.watch.events import Opening


def opening(job: Job, with_flop: bool = True) -> Opening:
    """All ranks together; counting the operations is left to those who tell."""
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
        position=job.progress.samples,
        notes=tuple(job.notes),
    )


def _flop_per_sample(job: Job) -> int:
    """Floating-point operations of one sample, forward and backward; 0 where the model cannot take a
    single one."""
    image = job.trainer.to_input(torch.zeros((1, *job.splits.shape), dtype=torch.uint8))
    try:
        return count_flop(job.trainer.model, image)
    except Exception:  # whatever a user's model raises: a run does not end for the sake of a figure
        return 0


def count_flop(model: nn.Module, images: Tensor) -> int:
    """Floating-point operations of forward and backward, counted by torch; a multiply-add counts
    two. The model is left as it was."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A batch norm cannot train on one sample, and its statistics are not ours to change.
    with evaluating(model), FlopCounterMode(display=False) as counter:
        torch.autograd.grad(model(images).sum(), trained, allow_unused=True)
    return int(counter.get_total_flops())


def memory_in_use() -> int:
    """Bytes that this process holds: on its GPU, else in memory."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else resident_nbytes()
