"""Evaluation of a trained run, or of one that is still training, on its own or on other data.

```
own data       the splits that the run's config opens: the score is the one that the run logged for
               these weights
--data PLACE   all samples there; the run's own data need not exist on this host. Images of any
               size: they are prepared as for `allstep predict`
```

With a number of samples, a fixed subset of the split: the same for every command that asks for as
many (`samples`). All ranks evaluate together, each its share, every sample once (`evaluate`). Rank
0 reads the checkpoint, so that all ranks have the same one, even while a running run writes new
ones. Nothing is written to the run folder.
"""

from dataclasses import dataclass

from allstep import comm
from allstep.comm.group import agree
from allstep.train.folder.existing_run import Evaluation, Which
from allstep.train.score.evaluate import evaluate
from allstep.train.task.classification import Classification
from allstep.train.use.load_run import find_run, make_device, make_trained
from allstep.train.use.samples import make_loader, open_samples
from allstep.train.watch.events import Score
from allstep.world import World


@dataclass(frozen=True)
class Reevaluated:
    """Score of the model of a run."""

    score: Score
    where: str
    """Description of the samples."""
    samples: int
    """Number of samples that the model was trained on."""
    which: Which
    """Weights that were evaluated."""
    num_bad: int
    """Number of unreadable samples over all ranks, which are not in the score."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as checkpoints that could not be used."""


def reevaluate(asked: Evaluation, world: World) -> Reevaluated:
    """Evaluate on all ranks of `world`, and return the same result on each."""
    found, config = agree.rank_0_decides(
        world, lambda: (find_run(asked.folder, asked.which, asked.trust), asked.config())
    )
    trained = agree.everyone(world, lambda: make_trained(found, make_device(asked.device)))
    # First on one rank per host, which makes indexes that the others read.
    is_first = world.local_rank == 0
    agree.everyone(world, lambda: open_samples(asked, config, trained) if is_first else None)
    opened = agree.everyone(world, lambda: open_samples(asked, config, trained))
    loader = make_loader(config, trained, opened, world, make_device(asked.device))
    try:
        task = Classification(trained.num_classes)
        flip = config.evaluation.flip
        score = evaluate(trained.model, loader, trained.to_input, task, flip=flip)
    finally:
        loader.close()
    num_bad = sum(agree.gather(world, loader.num_bad))
    return Reevaluated(score, opened.where, trained.samples, trained.which, num_bad, trained.notes)


def work(asked: Evaluation, launcher: str | None = None) -> Reevaluated | None:
    """Evaluate as a worker: join the world, evaluate, shut down. Only rank 0 returns the result."""
    world = comm.init(launcher)
    result = reevaluate(asked, world)
    comm.shutdown()
    return result if world.rank == 0 else None
