"""Evaluation of a trained run, or of one that is still training, on its own or on other data.

```
own data       the splits that the run's config opens: the score is the one that the run logged for
               these weights
--data PLACE   all samples there; the run's own data need not exist on this host. Images of any
               size: they are prepared as for `allstep predict`
```

All ranks evaluate together, each its share, every sample once (`evaluate`). Rank 0 reads the
checkpoint, so that all ranks have the same one, even while a running run writes new ones. Nothing
is written to the run folder.
"""

from dataclasses import dataclass
from pathlib import Path

from allstep import comm
from allstep.comm.group import agree
from allstep.data import Loader
from allstep.data.augment.transform import Transform
from allstep.data.opening import open_source
from allstep.data.sources.arrays import CifarSource, IdxSource
from allstep.data.sources.source import Source
from allstep.models.by_name import check_shape
from allstep.train.config.run_config import RunConfig
from allstep.train.folder.existing_run import Evaluation, Which
from allstep.train.input.classes import check_same_classes, given_names
from allstep.train.input.images import make_transform
from allstep.train.input.splits import Split, open_splits
from allstep.train.score.evaluate import evaluate
from allstep.train.task.make_task import make_task
from allstep.train.use.load_run import Trained, find_run, image_transform, make_device, make_trained
from allstep.train.use.predict import num_at_once
from allstep.train.watch.events import Figures, Score
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
    figures: Figures
    """How the figures of the score are shown."""
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
    agree.everyone(world, lambda: _opened(asked, config, trained) if is_first else None)
    opened = agree.everyone(world, lambda: _opened(asked, config, trained))
    if opened.transform is not None and opened.transform.shape is not None:
        height, width, channels = opened.transform.shape
        check_shape(config.model.name, trained.shape, (channels, height, width))
    loader = _loader(config, trained, opened, world, asked.device)
    try:
        task = make_task(config, trained.classes)
        flip = config.evaluation.flip
        score = evaluate(trained.model, loader, trained.to_input, task, flip=flip)
    finally:
        loader.close()
    num_bad = sum(agree.gather(world, loader.num_bad))
    figures = task.figures()
    return Reevaluated(
        score, opened.where, trained.samples, trained.which, figures, num_bad, trained.notes
    )


def work(asked: Evaluation, launcher: str | None = None) -> Reevaluated | None:
    """Evaluate as a worker: join the world, evaluate, shut down. Only rank 0 returns the result."""
    world = comm.init(launcher)
    result = reevaluate(asked, world)
    comm.shutdown()
    return result if world.rank == 0 else None


@dataclass(frozen=True)
class _Opened:
    """Samples to evaluate."""

    split: Split | None
    """Split of the run's data; None for other data."""
    source: Source
    transform: Transform | None
    where: str
    """Description of the samples."""


def _opened(asked: Evaluation, config: RunConfig, trained: Trained) -> "_Opened":
    """Open the run's own data, or the data at another place."""
    if asked.place is not None:
        return _elsewhere(asked.place, asked, config, trained)
    return _own(asked, config, trained)


def _own(asked: Evaluation, config: RunConfig, trained: Trained) -> _Opened:
    """Open a split of the run's own data."""
    splits = open_splits(config)
    check_same_classes(splits.place, splits.classes, trained.classes)
    split = {"test": splits.test, "validation": splits.validation, "train": splits.train}[
        asked.split
    ]
    if config.overfit is not None:
        split = splits.train.first(config.overfit)
    transform = make_transform("prepare", config.data, split.seen)
    return _Opened(split, split.source, transform, f"{asked.split} split of {splits.title}")


def _elsewhere(place: str, asked: Evaluation, config: RunConfig, trained: Trained) -> _Opened:
    """Open all data at another place."""
    section = config.data
    source = open_source(
        place,
        labels_from=section.labels_from,
        num_classes=section.num_classes,
        classes=given_names(trained.classes),
    )
    has_test = isinstance(source, IdxSource | CifarSource) and Path(place).is_dir()
    if asked.split == "test" and has_test:
        source = open_source(place, train=False)
    check_same_classes(place, source.classes, trained.classes)
    transform = image_transform(section.prepare, trained.shape, section.max_pixels)
    return _Opened(None, source, transform, place)


def _loader(
    config: RunConfig, trained: Trained, opened: _Opened, world: World, device: str
) -> Loader:
    """Return the loader of the samples."""
    section, split = config.data, opened.split
    return Loader(
        opened.source,
        opened.transform,
        batch=num_at_once(trained.shape) * world.size,
        world=world,
        seed=None,
        numbers=None if split is None else split.numbers,
        workers=section.workers,
        strict=section.strict,
        budget=section.budget,
        device=make_device(device),
    )
