"""Checks that the keys of a config fit each other and this machine, before a run starts.

pydantic checks single keys. Each check here raises a message of one line with the values. Checks
that need the data are in `run.prepare`. `notes` returns hints for a run that can start, but may not
do what its user expects.
"""

from collections.abc import Callable, Iterable, Sequence

from allstep.data import NAMED
from allstep.data.augment.parse import check_mix, spelled
from allstep.data.order import check_weights, lengths
from allstep.errors import ConfigError
from allstep.models.by_name import check_name, check_options
from allstep.train.config.check_sync import check_sync
from allstep.train.config.initial_weights import initial_weights
from allstep.train.config.num_workers import count_gpus
from allstep.train.config.number_types import Shares
from allstep.train.config.read_config import warmup_that_fits
from allstep.train.config.recipes import RECIPES, SMALLEST
from allstep.train.config.run_config import NEUTRAL, ResolvedConfig, RunConfig
from allstep.train.config.usual_batch import usual_batch

_FEW_UPDATES = 8
"""Updates in an epoch: with fewer, even 100 epochs are less than 800 updates, which is rarely
intended."""


def check_config(config: RunConfig, num_workers: int | None = None) -> None:
    """Raise ConfigError if the run cannot start with any data.

    Keys that depend on the batch are checked only if the batch is known: with `batch_per_worker` it
    depends on `num_workers`.
    """
    check_name(config.model.name)
    check_options(config.model.name, config.model.options)
    for check in (_operations, _data, _device):
        check(config)
    if config.batch_per_worker is not None and num_workers is None:
        return
    resolved = config.resolved(num_workers or 1)
    for check_resolved in (_ghost, _check_micro_batches, _schedule, _growth, check_sync):
        check_resolved(resolved)
    if num_workers is not None:
        _shares(resolved, num_workers)
        _ghost_divides(resolved, num_workers)
    _single_samples(resolved, num_workers or 1)


def check_batch(config: ResolvedConfig, num_train: int) -> None:
    """Raise ConfigError if the batch, or `overfit`, exceeds the `num_train` training samples.

    With `overfit` the batch may exceed them: training on few samples is its purpose.
    """
    if config.overfit is not None:
        if config.overfit > num_train:
            raise ConfigError(
                f"config key 'overfit': expected 1 to {num_train} training samples, found"
                f" {config.overfit}"
            )
    elif config.batch > num_train:
        raise ConfigError(
            f"config key 'batch': a batch of {config.batch} is larger than the training split,"
            f" which has {num_train} samples"
        )


def check_elastic(config: RunConfig, num_workers: int, sizes: Iterable[int]) -> None:
    """Raise ConfigError if `config` cannot be trained by workers that may be lost.

    The run starts with `num_workers` workers, which decide its batch, and may have any of the
    numbers in `sizes` later.
    """
    resolved = config.resolved(num_workers)
    for size in sizes:
        try:
            _ghost_divides(resolved, size)
            _single_samples(resolved, size)
        except ConfigError as error:
            why = f"an elastic run may have {_plural(size, 'worker')}"
            raise ConfigError(
                f"{error} ({why}: limit it by --min-workers and --max-workers, under `allstep run`"
                " by --min-np and --max-np)"
            ) from None


def notes(config: ResolvedConfig, num_workers: int, num_train: int) -> list[str]:
    """Return hints for the user about a run that is about to start, one line each.

    `num_train` is the number of samples of an epoch.
    """
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


def _shares(config: ResolvedConfig, num_workers: int) -> None:
    """Raise ConfigError unless `shares` fits the workers and the norms."""
    if config.shares == "even":
        return
    if config.model.norm == "ghost":
        raise ConfigError(
            f"shares={_spelled(config.shares)} and model.norm=ghost exclude each other: ghost"
            " batches of uneven shares have different sizes; set shares=even, or model.norm=group"
            " or sync"
        )
    if config.shares != "speed":
        check_weights(config.shares, num_workers)


def _spelled(shares: Shares) -> str:
    return shares if isinstance(shares, str) else str(list(shares))


def _ghost_divides(config: ResolvedConfig, num_workers: int) -> None:
    """Raise ConfigError if `model.ghost` does not divide equal micro-batches.

    Micro-batches that differ by a sample have no common divisor; `_groups` reports how these are
    divided.
    """
    ghost = config.model.ghost
    micro_batch, rest = divmod(config.batch, num_workers * config.accumulation)
    if config.model.norm != "ghost" or rest or micro_batch <= ghost or micro_batch % ghost == 0:
        return
    # Imported late, because it imports torch.
    from allstep.norm.ghost import nearest_divisors

    better = " or ".join(map(str, nearest_divisors(micro_batch, ghost)))
    raise ConfigError(
        f"config key 'model.ghost': {ghost} does not divide the"
        f" {_plural(micro_batch, 'sample')} that each of {_plural(num_workers, 'worker')} computes"
        f" at a time: take model.ghost={better},"
        " or another batch"
    )


def _groups(config: ResolvedConfig, num_workers: int) -> str | None:
    """Return a note on the sizes of ghost batches if they do not divide a micro-batch evenly."""
    # Imported late, because it imports torch.
    from allstep.norm.ghost import num_parts

    ghost, share = config.model.ghost, -(-config.batch // num_workers)
    micro_batch = -(-share // config.accumulation)
    if config.model.norm != "ghost" or micro_batch % ghost == 0:
        return None
    count = num_parts(micro_batch, ghost)
    low, high = micro_batch // count, -(-micro_batch // count)
    each = f"{low}" if low == high else f"{low} or {high}"
    return (
        f"model.ghost={ghost} does not divide the {_plural(micro_batch, 'sample')} that a worker"
        f" computes at a time: they are cut into {_plural(count, 'group')} of {each}"
    )


def _single_samples(config: ResolvedConfig, num_workers: int) -> None:
    """Raise ConfigError if a batch norm would train on one sample, which has no variance."""
    samples = min(config.batch, config.overfit or config.batch)
    if _at_a_time(config, samples, num_workers) == 1:
        others = "group" if config.model.norm == "sync" else "sync or group"
        raise ConfigError(
            f"config key 'batch': {_plural(samples, 'sample')} on {_plural(num_workers, 'worker')}"
            f" in {_plural(config.accumulation, 'micro-batch')} each are 1 at a time, and"
            f" model.norm={config.model.norm} needs 2 or more in training: set a larger batch,"
            f" fewer workers or micro-batches (accumulation), or model.norm={others}"
        )


def _at_a_time(config: ResolvedConfig, samples: int, num_workers: int) -> int | None:
    """Return the smallest number of samples that a batch norm sees at once; None without one.

    `samples` is the number of samples of all workers together.
    """
    if config.model.norm not in ("batch", "ghost", "sync"):
        return None
    counts = lengths(samples, initial_weights(config.shares, num_workers))
    num_micro_batches = min(config.accumulation, max(counts))
    if config.model.norm == "sync":
        return sum(count // num_micro_batches for count in counts) or samples
    return min(max(1, count // num_micro_batches) for count in counts if count)


def _plural(count: int, what: str) -> str:
    ending = "es" if what.endswith("ch") else "s"
    return f"{count} {what}" + ending * (count != 1)


def _last_batch(config: ResolvedConfig, num_workers: int, num_train: int) -> str | None:
    """Return a note if a batch norm sees one sample at a time in the last batch of an epoch.

    It is not an error, because most norms have many pixels per sample.
    """
    rest = num_train % config.batch
    if not rest or _at_a_time(config, rest, num_workers) != 1:
        return None
    return (
        f"the last batch of an epoch has {_plural(rest, 'sample')}, so that"
        f" model.norm={config.model.norm} sees 1 at a time: a norm of single pixels would fail"
        " there; another batch leaves another rest"
    )


def _few_updates(config: ResolvedConfig, num_train: int) -> str | None:
    """Return a note if an epoch has very few updates.

    Only for configs without a recipe: the batch of a recipe fits its data, and studies change it
    intentionally.
    """
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
    """Return a note if the noise scale cannot be measured, since a step has a single gradient."""
    wanted = config.noise_scale or config.growth.by_noise
    if not wanted or num_workers > 1 or config.accumulation > 1:
        return None
    what = (
        "growth.by_noise: the batch will not grow"
        if config.growth.by_noise
        else "noise_scale: nothing is measured"
    )
    return (
        f"{what}, since one worker with one micro-batch has one gradient per step: set"
        " accumulation=2, or use more workers"
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
            f"data.folder={section.folder} is for a named dataset, and"
            f" data.train={section.train} names data of your own: give only one of them"
        )


def _check_micro_batches(config: ResolvedConfig) -> None:
    if config.accumulation > config.batch:
        raise ConfigError(
            f"config key 'accumulation': a batch of {config.batch} cannot be divided into"
            f" {config.accumulation} micro-batches"
        )


def _schedule(config: ResolvedConfig) -> None:
    section = config.schedule
    if section.milestones and section.shape != "step":
        raise ConfigError(
            f"schedule.milestones belong to schedule.shape=step, and the shape is {section.shape}:"
            " leave one of them out"
        )
    # Not `num_epochs`: a longer run (keep_updates) stretches the milestones.
    _check_epochs("schedule.milestones", section.milestones, config.epochs)
    if config.warmup:
        _warm_up(config)


def _warm_up(config: ResolvedConfig) -> None:
    """Raise ConfigError unless the warm-up fits the shape and ends before the first milestone."""
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
        usual = "none are given, so they are 1/3, 2/3 and 8/9 of the run, and "
        given = "" if section.milestones else usual
        raise ConfigError(
            f"config key 'schedule.milestones': {given}epoch {config.milestones[0]:g} is within the"
            f" warm-up of {warmup:g} epochs, where the learning rate cannot fall: set a shorter"
            " schedule.warmup, or milestones after it"
        )


def _shorter_warm_up(config: ResolvedConfig) -> str | None:
    """Return a note if `read_config` shortened the recipe's warm-up to fit the run."""
    if config.recipe not in RECIPES:
        return None
    recipe = RECIPES[config.recipe]().resolved(1)
    usual = recipe.warmup_epochs
    fitted = warmup_that_fits(recipe, usual, config.epochs)
    if config.warmup != fitted or fitted == usual:
        return None
    return (
        f"the recipe's warm-up of {usual:g} epochs is longer than the run, which has"
        f" {config.epochs}: it is {fitted:.3g} epochs here, the same fraction of the run"
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
    """Raise ConfigError unless the epochs of `key` increase and are before the end of the run."""
    if list(epochs) != sorted(set(epochs)):
        raise ConfigError(
            f"config key '{key}': expected increasing epochs, found {_listed(epochs)}"
        )
    in_time = [epoch for epoch in epochs if epoch < last]
    if len(in_time) < len(epochs):
        raise ConfigError(
            f"config key '{key}': epoch {epochs[len(in_time)]:g} is not reached, the run has"
            f" {last}: write {key}=[{_listed(in_time)}], or train longer (epochs)"
        )


def _listed(epochs: Sequence[float]) -> str:
    return ", ".join(f"{epoch:g}" for epoch in epochs)


def _device(config: RunConfig) -> None:
    if config.device == "cuda" and not count_gpus():
        raise ConfigError(
            "config key 'device': cuda is requested, but there is no GPU that torch can use here;"
            " device=auto uses the devices that are available"
        )
