"""Keys of a config that must fit each other, or this machine: what pydantic cannot see, told before
anything is started.

Each check is one line for the user, with the figures. What needs the data is in `run.prepare`.
`notes` are for runs that can run, and perhaps not as their user thinks.
"""

from collections.abc import Callable, Sequence

from allstep.data import NAMED
from allstep.data.augment.parse import check_mix, spelled
from allstep.errors import ConfigError
from allstep.models.by_name import check_name, check_options
from allstep.train.config.num_workers import count_gpus
from allstep.train.config.read import warmup_that_fits
from allstep.train.config.recipes import RECIPES, SMALLEST
from allstep.train.config.run_config import NEUTRAL, ResolvedConfig, RunConfig, usual_batch

_FEW_UPDATES = 8
"""In an epoch: with fewer even 100 epochs are less than 800 updates, hardly what a user wants."""


def check_config(config: RunConfig, num_workers: int | None = None) -> None:
    """ConfigError when no data could make this a run that can run.

    What is said of the batch is checked when the batch is known: it may depend on the number of
    workers.
    """
    check_name(config.model.name)
    check_options(config.model.name, config.model.options)
    for check in (_operations, _data, _device):
        check(config)
    if config.batch_per_worker is not None and num_workers is None:
        return
    resolved = config.resolved(num_workers or 1)
    for check_resolved in (_ghost, _check_micro_batches, _schedule, _growth):
        check_resolved(resolved)
    _single_samples(resolved, num_workers or 1)
    if num_workers is not None:
        _ghost_divides(resolved, num_workers)


def check_batch(config: ResolvedConfig, num_train: int) -> None:
    """ConfigError when there are fewer training samples than the run wants at once; a smaller set
    is just what `overfit` asks for."""
    if config.overfit is not None:
        if config.overfit > num_train:
            raise ConfigError(
                f"config key 'overfit': expected 1 to {num_train} training samples, found"
                f" {config.overfit}"
            )
    elif config.batch > num_train:
        raise ConfigError(
            f"config key 'batch': a batch of {config.batch} is larger than the training set, which"
            f" has {num_train} samples"
        )


def notes(config: ResolvedConfig, num_workers: int, num_train: int) -> list[str]:
    """What the user should know about a run that is about to start; `num_train`: samples of an
    epoch."""
    found = (
        _shorter_warm_up(config),
        _groups(config, num_workers),
        _unseen_noise(config, num_workers),
        _last_batch(config, num_workers, num_train),
        _few_updates(config, num_train),
    )
    return [note for note in found if note]


def _ghost(config: ResolvedConfig) -> None:
    section, batch = config.model, config.batch
    if section.norm == "ghost" and section.ghost < 2:
        raise ConfigError(
            "config key 'model.ghost': expected at least 2 samples, which have a variance, found"
            f" {section.ghost}; 16 to 128 are usual"
        )
    if section.norm == "ghost" and section.ghost > batch:
        raise ConfigError(
            f"config key 'model.ghost': a ghost batch of {section.ghost} samples is larger than the"
            f" batch, which has {batch}"
        )


def _ghost_divides(config: ResolvedConfig, num_workers: int) -> None:
    """Only where a size could: shares that differ by a sample are cut as well as they can be, see
    `_groups`."""
    ghost, (micro_batch, rest) = (
        config.model.ghost,
        divmod(config.batch, num_workers * config.accumulation),
    )
    if config.model.norm != "ghost" or rest or micro_batch <= ghost or micro_batch % ghost == 0:
        return
    from allstep.norm.ghost import nearest_divisors  # torch

    better = " or ".join(map(str, nearest_divisors(micro_batch, ghost)))
    raise ConfigError(
        f"config key 'model.ghost': {ghost} does not divide the {_plural(micro_batch, 'sample')} that"
        f" each of {_plural(num_workers, 'worker')} computes at a time: take model.ghost={better},"
        " or another batch"
    )


def _groups(config: ResolvedConfig, num_workers: int) -> str | None:
    """How ghost batches will be, where their size does not divide what a worker computes at a time,
    and no other would."""
    from allstep.norm.ghost import num_parts  # torch

    ghost, share = config.model.ghost, -(-config.batch // num_workers)
    micro_batch = -(-share // config.accumulation)
    if config.model.norm != "ghost" or micro_batch % ghost == 0:
        return None
    parts = num_parts(micro_batch, ghost)
    low, high = micro_batch // parts, -(-micro_batch // parts)
    each = f"{low}" if low == high else f"{low} or {high}"
    return (
        f"model.ghost={ghost} does not divide the {_plural(micro_batch, 'sample')} that a worker computes"
        f" at a time: they are cut into {_plural(parts, 'group')} of {each}"
    )


def _single_samples(config: ResolvedConfig, num_workers: int) -> None:
    """One sample has no variance: a batch norm that trains needs two."""
    samples, num_micro_batches = (
        min(config.batch, config.overfit or config.batch),
        config.accumulation,
    )
    if _at_a_time(config, samples, num_workers) == 1:
        others = "group" if config.model.norm == "sync" else "sync or group"
        raise ConfigError(
            f"config key 'batch': {_plural(samples, 'sample')} on {_plural(num_workers, 'worker')}"
            f" in {_plural(num_micro_batches, 'piece')} each are 1 at a time, and"
            f" model.norm={config.model.norm} needs 2 or more in training: take a larger batch,"
            f" fewer workers or pieces (accumulation), or model.norm={others}"
        )


def _at_a_time(config: ResolvedConfig, samples: int, num_workers: int) -> int | None:
    """The fewest samples that a batch norm sees at once, when all workers together have so many;
    None: there is no batch norm."""
    if config.model.norm not in ("batch", "ghost", "sync"):
        return None
    share = samples // num_workers
    micro_batch = share // min(config.accumulation, share) if share else 1
    if config.model.norm == "sync":
        return micro_batch * num_workers if share else samples
    return micro_batch


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def _last_batch(config: ResolvedConfig, num_workers: int, num_train: int) -> str | None:
    """No error: most norms see many pixels of a sample, and can do with one."""
    rest = num_train % config.batch
    if not rest or _at_a_time(config, rest, num_workers) != 1:
        return None
    return (
        f"the last batch of an epoch has {_plural(rest, 'sample')}, so that"
        f" model.norm={config.model.norm} sees 1 at a time: a norm of single pixels would fail"
        " there; another batch leaves another rest"
    )


def _few_updates(config: ResolvedConfig, num_train: int) -> str | None:
    """A recipe's batch fits its data, and studies change it on purpose: only a user's own config is
    looked at."""
    updates = -(-num_train // config.batch)
    if config.recipe != NEUTRAL or config.overfit is not None or updates >= _FEW_UPDATES:
        return None
    fits = usual_batch(config.optimizer.base_batch, num_train)
    return (
        f"an epoch has only {_plural(updates, 'update')}: {_plural(num_train, 'training sample')}"
        f" at batch {config.batch}; a model learns little in so few: leave the batch out (it is"
        f" {fits} then), or train many more epochs"
    )


def _unseen_noise(config: ResolvedConfig, num_workers: int) -> str | None:
    """One gradient says nothing about how much gradients differ."""
    wanted = config.noise_scale or config.growth.by_noise
    if not wanted or num_workers > 1 or config.accumulation > 1:
        return None
    what = (
        "growth.by_noise: the batch will not grow"
        if config.growth.by_noise
        else "noise_scale: nothing is measured"
    )
    return (
        f"{what}, since one worker with one piece has one gradient a step: take accumulation=2, or"
        " more workers"
    )


def _operations(config: RunConfig) -> None:
    for key, spell in (("augment", spelled), ("prepare", spelled), ("mix", check_mix)):
        _within(f"data.{key}", spell, getattr(config.data, key))


def _within(key: str, spell: Callable[[str], object], text: str) -> None:
    try:
        spell(text)
    except ConfigError as error:
        raise ConfigError(f"config key '{key}': {error}") from error


def _data(config: RunConfig) -> None:
    section = config.data
    if (section.mean is None) != (section.std is None):
        given, other = ("mean", "std") if section.mean is not None else ("std", "mean")
        raise ConfigError(
            f"data.{given} is given without data.{other}: give both, or neither, and both are"
            " measured"
        )
    if not section.name and section.train is None:
        raise ConfigError(
            "the config names no data: set data.train to the place of your own, or data.name to a"
            f" known dataset ({', '.join(NAMED)}), or start from a recipe that has data (recipe:"
            f" {SMALLEST})"
        )
    if section.train is not None and section.folder is not None:
        raise ConfigError(
            f"data.folder={section.folder} is where a named set lies, and"
            f" data.train={section.train} names data of your own: give one"
        )


def _check_micro_batches(config: ResolvedConfig) -> None:
    if config.accumulation > config.batch:
        raise ConfigError(
            f"config key 'accumulation': a batch of {config.batch} cannot be computed in"
            f" {config.accumulation} pieces"
        )


def _schedule(config: ResolvedConfig) -> None:
    section = config.schedule
    if section.milestones and section.shape != "step":
        raise ConfigError(
            f"schedule.milestones belong to schedule.shape=step, and the shape is {section.shape}:"
            " leave one of them out"
        )
    _check_epochs(
        "schedule.milestones", section.milestones, config.epochs
    )  # a longer run (keep_updates) stretches them
    if config.warmup:
        _warm_up(config)


def _warm_up(config: ResolvedConfig) -> None:
    """It is asked for, fits into the run, and is over before the rate falls."""
    section, warmup, epochs = config.schedule, config.warmup, config.num_epochs
    if section.shape == "one-cycle":
        raise ConfigError(
            f"schedule.warmup={warmup:g} and schedule.shape=one-cycle exclude each other: one-cycle"
            " rises by itself, over the first 30% of the run; leave the warm-up out"
            " (schedule.warmup=0)"
        )
    if warmup > epochs:
        raise ConfigError(
            f"config key 'schedule.warmup': a warm-up of {warmup:g} epochs is longer than the run,"
            f" which has {epochs}: write schedule.warmup={epochs / 6:.2g}, a sixth of it, or train"
            " longer (epochs)"
        )
    if section.shape == "step" and config.milestones[0] <= warmup:
        given = (
            ""
            if section.milestones
            else "none are given, so they are 1/3, 2/3 and 8/9 of the run, and "
        )
        raise ConfigError(
            f"config key 'schedule.milestones': {given}epoch {config.milestones[0]:g} lies within"
            f" the warm-up of {warmup:g} epochs, where no rate can fall: set a shorter"
            " schedule.warmup, or milestones after it"
        )


def _shorter_warm_up(config: ResolvedConfig) -> str | None:
    """The recipe's warm-up did not fit into the run, and `source` made it shorter."""
    if config.recipe not in RECIPES:
        return None
    recipe = RECIPES[config.recipe]().resolved(1)
    usual = recipe.warmup_epochs
    fitted = warmup_that_fits(recipe, usual, config.epochs)
    if config.warmup != fitted or fitted == usual:
        return None
    return (
        f"the recipe's warm-up of {usual:g} epochs is longer than the run, which has"
        f" {config.epochs}: it is {fitted:.3g} epochs here, the same part of the run"
        " (schedule.warmup)"
    )


def _growth(config: ResolvedConfig) -> None:
    section, batch = config.growth, config.batch
    if section.by_noise and section.at:
        raise ConfigError(
            "growth.at and growth.by_noise are two ways to decide when the batch grows; give one of"
            " them"
        )
    if section.max is not None and section.max < batch:
        raise ConfigError(
            f"config key 'growth.max': expected at least the batch, {batch}, found {section.max}"
        )
    _check_epochs("growth.at", section.at, config.num_epochs)


def _check_epochs(key: str, epochs: Sequence[float], last: int) -> None:
    """They come one after the other, and before the run ends."""
    if list(epochs) != sorted(set(epochs)):
        raise ConfigError(f"config key '{key}': expected growing epochs, found {_listed(epochs)}")
    in_time = [epoch for epoch in epochs if epoch < last]
    if len(in_time) < len(epochs):
        raise ConfigError(
            f"config key '{key}': epoch {epochs[len(in_time)]:g} never comes, the run has {last}:"
            f" write {key}=[{_listed(in_time)}], or train longer (epochs)"
        )


def _listed(epochs: Sequence[float]) -> str:
    return ", ".join(f"{epoch:g}" for epoch in epochs)


def _device(config: RunConfig) -> None:
    if config.device == "cuda" and not count_gpus():
        raise ConfigError(
            "config key 'device': cuda is asked for, and there is no GPU that torch could use here;"
            " auto takes what there is"
        )
