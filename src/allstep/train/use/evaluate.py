"""Evaluates a run that was trained, or is being trained, once more: on its own data, or on other
data.

```
own data       the parts of the run, as its config opens them: the score is the one that the run logged for these weights
--data PLACE   all samples there; the run's own data need not be here. Any images: they are prepared as for `allstep predict`
```

All ranks together, each its share, every sample once (`evaluate`). Rank 0 reads the checkpoint, so
that all have the same one, although a run that is under way writes new ones meanwhile. Nothing is
written to the run folder.
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
from allstep.train.folder.read import Evaluation, Which
from allstep.train.input.classes import check_same_classes, given_names
from allstep.train.input.images import make_transform
from allstep.train.input.splits import Split, open_splits
from allstep.train.score.evaluate import evaluate
from allstep.train.task.classification import Classification
from allstep.train.use.load import Trained, find_run, image_transform, make_device, make_trained
from allstep.train.use.predict import num_at_once
from allstep.train.watch.events import Score
from allstep.world import World


@dataclass(frozen=True)
class Reevaluated:
    """How good the model of a run is."""

    score: Score
    where: str
    """Which samples, in words."""
    samples: int
    """That the model was trained on."""
    which: Which
    num_bad: int
    """Samples that could not be read, over all ranks: they are not in the score."""
    notes: tuple[str, ...] = ()


def reevaluate(asked: Evaluation, world: World) -> Reevaluated:
    """On all ranks of `world`, the same on each."""
    found, config = agree.rank_0_decides(
        world, lambda: (find_run(asked.folder, asked.which, asked.trust), asked.config())
    )
    trained = agree.everyone(world, lambda: make_trained(found, make_device(asked.device)))
    agree.everyone(
        world, lambda: _opened(asked, config, trained) if world.local_rank == 0 else None
    )  # indexes are made once
    opened = agree.everyone(world, lambda: _opened(asked, config, trained))
    if opened.transform is not None and opened.transform.shape is not None:
        height, width, channels = opened.transform.shape
        check_shape(config.model.name, trained.shape, (channels, height, width))
    loader = _loader(config, trained, opened, world, asked.device)
    try:
        task = Classification(trained.num_classes)
        score = evaluate(
            trained.model, loader, trained.to_input, task, mirror=config.evaluation.flip
        )
    finally:
        loader.close()
    num_bad = sum(agree.gather(world, loader.num_bad))
    return Reevaluated(score, opened.where, trained.samples, trained.which, num_bad, trained.notes)


def work(asked: Evaluation, launcher: str | None = None) -> Reevaluated | None:
    """As a worker of whatever world there is, from its start to its end; only rank 0 has the
    result."""
    world = comm.init(launcher)
    result = reevaluate(asked, world)
    comm.shutdown()
    return result if world.rank == 0 else None


@dataclass(frozen=True)
class _Opened:
    """Samples to be evaluated on."""

    part: Split | None
    source: Source
    transform: Transform | None
    where: str


def _opened(asked: Evaluation, config: RunConfig, trained: Trained) -> "_Opened":
    return (
        _elsewhere(asked.place, asked, config, trained)
        if asked.place is not None
        else _own(asked, config, trained)
    )


def _own(asked: Evaluation, config: RunConfig, trained: Trained) -> _Opened:
    parts = open_splits(config)
    check_same_classes(parts.place, parts.classes, trained.classes)
    part = {"test": parts.test, "validation": parts.validation, "train": parts.train}[asked.split]
    if config.overfit is not None:
        part = parts.train.first(config.overfit)
    transform = make_transform("prepare", config.data, part.seen)
    return _Opened(part, part.source, transform, f"{asked.split} part of {parts.title}")


def _elsewhere(place: str, asked: Evaluation, config: RunConfig, trained: Trained) -> _Opened:
    section = config.data
    source = open_source(
        place,
        labels_from=section.labels_from,
        num_classes=section.num_classes,
        classes=given_names(trained.classes),
    )
    if (
        asked.split == "test"
        and isinstance(source, IdxSource | CifarSource)
        and Path(place).is_dir()
    ):
        source = open_source(place, train=False)
    check_same_classes(place, source.classes, trained.classes)
    return _Opened(
        None, source, image_transform(section.prepare, trained.shape, section.max_pixels), place
    )


def _loader(
    config: RunConfig, trained: Trained, opened: _Opened, world: World, device: str
) -> Loader:
    section = config.data
    return Loader(
        opened.source,
        opened.transform,
        batch=num_at_once(trained.shape) * world.size,
        world=world,
        seed=None,
        numbers=None if opened.part is None else opened.part.numbers,
        workers=section.workers,
        strict=section.strict,
        budget=section.budget,
        device=make_device(device),
    )
