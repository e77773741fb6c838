"""What a worker does before it joins an elastic run: everything that needs no other rank.

The others wait for the first step of a worker that joins. So it imports, opens the data, builds
model and optimizer and computes one step on a copy of the model before it asks for its place:
torch sets up much only then.
"""

import copy

import torch

from allstep.train.config.check_sync import check_replacements
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.folder.claim import as_begun
from allstep.train.run.example_batch import make_example
from allstep.train.run.placed_job import Job
from allstep.train.run.prepare import prepare
from allstep.train.run.setup import make_job
from allstep.train.run.train_request import TrainRequest
from allstep.train.step import build
from allstep.train.step.precision_choice import loss_in
from allstep.world import World

_MAX_SAMPLES = 256


def prepare_standby(
    asked: TrainRequest, num_workers: int, worker: int
) -> tuple[ResolvedConfig, Job]:
    """Return the config that the run probably has, and a job of it in a world of its own.

    Without --out only the others know the run folder: `Job.move_to` sets it when they have sent it.
    `num_workers` is the number with which the run started, `worker` the number of this worker.
    """
    config = prepare(asked.source, asked.overrides, asked.data).config.resolved(num_workers)
    check_replacements(config)
    if asked.out is not None:
        config = as_begun(config, asked.out)
    # The state that it receives has the mode that was measured at the start.
    mode = {"execution": "channels-last"} if config.execution == "auto" else {}
    job = make_job(config.model_copy(update=mode), World.alone(), asked.out, worker=worker)
    warm_up(job, num_workers)
    return config, job


def warm_up(job: Job, num_workers: int) -> None:
    """Compute one step of a copy of the model on samples of no importance."""
    share = min(_MAX_SAMPLES, max(2, -(-job.progress.batch // num_workers)))
    trainer = job.trainer
    with torch.random.fork_rng(devices=[]):
        model = copy.deepcopy(trainer.model)
        optimizer = build.make_optimizer(job.config, model)
        example = make_example(trainer.task, job.splits, trainer.to_input, share)
        # torch does not annotate `backward`.
        loss_in(trainer.precision, trainer.task)(model, example).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
