"""Keys of a config that must fit each other, or this machine: what pydantic cannot see, told before anything is started.

Each check is one line for the user, with the figures. What needs the data is in `prepare`. `notes` are for runs that can run, and
perhaps not as their user thinks.
"""

from collections.abc import Callable, Sequence

from allstep.data.spelled import check_mix, spelled
from allstep.errors import ConfigError
from allstep.models.by_name import check_name, check_options
from allstep.train.config import RunConfig
from allstep.train.workers import count_gpus


def check_config(config: RunConfig, num_workers: int | None = None) -> None:
    """ConfigError when no data could make this a run that can run.

    What is said of the batch is checked when the batch is known: it may depend on the number of workers.
    """
    check_name(config.model.name)
    check_options(config.model.name, config.model.options)
    for check in (_operations, _data, _device):
        check(config)
    if config.batch_per_worker is None or num_workers is not None:
        for check in (_ghost, _pieces, _schedule, _growth):
            check(config.resolved(num_workers or 1))
        _single_samples(config.resolved(num_workers or 1), num_workers or 1)


def notes(config: RunConfig, num_workers: int, num_train: int) -> list[str]:
    """What the user should know about a run that is about to start; `num_train`: samples of an epoch."""
    return [note for note in (_unseen_noise(config, num_workers), _last_batch(config, num_workers, num_train)) if note]


def _ghost(config: RunConfig) -> None:
    section, batch = config.model, config.global_batch
    if section.norm == "ghost" and section.ghost < 2:
        raise ConfigError(
            f"config key 'model.ghost': expected at least 2 samples, which have a variance, found {section.ghost}; 16 to 128 are usual"
        )
    if section.norm == "ghost" and section.ghost > batch:
        raise ConfigError(
            f"config key 'model.ghost': a ghost batch of {section.ghost} samples is larger than the batch, which has {batch}"
        )


def _single_samples(config: RunConfig, num_workers: int) -> None:
    """One sample has no variance: a batch norm that trains needs two."""
    samples, pieces = min(config.global_batch, config.overfit or config.global_batch), config.accumulation
    if _at_a_time(config, samples, num_workers) == 1:
        others = "group" if config.model.norm == "sync" else "sync or group"
        raise ConfigError(
            f"config key 'batch': {_plural(samples, 'sample')} on {_plural(num_workers, 'worker')} in {_plural(pieces, 'piece')} each "
            f"are 1 at a time, and model.norm={config.model.norm} needs 2 or more in training: take a larger batch, fewer workers or "
            f"pieces (accumulation), or model.norm={others}"
        )


def _at_a_time(config: RunConfig, samples: int, num_workers: int) -> int | None:
    """The fewest samples that a batch norm sees at once, when all workers together have so many; None: there is no batch norm."""
    if config.model.norm not in ("batch", "ghost", "sync"):
        return None
    share = samples // num_workers
    piece = share // min(config.accumulation, share) if share else 1
    if config.model.norm == "sync":
        return piece * num_workers if share else samples
    return piece


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def _last_batch(config: RunConfig, num_workers: int, num_train: int) -> str | None:
    """No error: most norms see many pixels of a sample, and can do with one."""
    rest = num_train % config.global_batch
    if not rest or _at_a_time(config, rest, num_workers) != 1:
        return None
    return (
        f"the last batch of an epoch has {_plural(rest, 'sample')}, so that model.norm={config.model.norm} sees 1 at a time: a norm of "
        "single pixels would fail there; another batch leaves another rest"
    )


def _unseen_noise(config: RunConfig, num_workers: int) -> str | None:
    """One gradient says nothing about how much gradients differ."""
    wanted = config.noise_scale or config.growth.by_noise
    if not wanted or num_workers > 1 or config.accumulation > 1:
        return None
    what = "growth.by_noise: the batch will not grow" if config.growth.by_noise else "noise_scale: nothing is measured"
    return f"{what}, since one worker with one piece has one gradient a step: take accumulation=2, or more workers"


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
    if (section.mean is None) != (section.deviation is None):
        given, other = ("mean", "deviation") if section.mean is not None else ("deviation", "mean")
        raise ConfigError(f"data.{given} is given without data.{other}: give both, or neither, and both are measured")
    if section.train is not None and section.folder is not None:
        raise ConfigError(
            f"data.folder={section.folder} is where a named set lies, and data.train={section.train} names data of your own: give one"
        )


def _pieces(config: RunConfig) -> None:
    if config.accumulation > config.global_batch:
        raise ConfigError(
            f"config key 'accumulation': a batch of {config.global_batch} cannot be computed in {config.accumulation} pieces"
        )


def _schedule(config: RunConfig) -> None:
    section = config.schedule
    if section.milestones and section.shape != "step":
        raise ConfigError(
            f"schedule.milestones belong to schedule.shape=step, and the shape is {section.shape}: leave one of them out"
        )
    _check_epochs(
        "schedule.milestones", section.milestones, config.epochs
    )  # a longer run (keep_updates) stretches them


def _growth(config: RunConfig) -> None:
    section, batch = config.growth, config.global_batch
    if section.by_noise and section.at:
        raise ConfigError("growth.at and growth.by_noise are two ways to decide when the batch grows; give one of them")
    if section.most is not None and section.most < batch:
        raise ConfigError(f"config key 'growth.most': expected at least the batch, {batch}, found {section.most}")
    _check_epochs("growth.at", section.at, config.num_epochs)


def _check_epochs(key: str, epochs: Sequence[float], last: int) -> None:
    """They come one after the other, and before the run ends."""
    if list(epochs) != sorted(set(epochs)):
        raise ConfigError(f"config key '{key}': expected growing epochs, found {_listed(epochs)}")
    in_time = [epoch for epoch in epochs if epoch < last]
    if len(in_time) < len(epochs):
        raise ConfigError(
            f"config key '{key}': epoch {epochs[len(in_time)]:g} never comes, the run has {last}: write {key}=[{_listed(in_time)}], "
            "or train longer (epochs)"
        )


def _listed(epochs: Sequence[float]) -> str:
    return ", ".join(f"{epoch:g}" for epoch in epochs)


def _device(config: RunConfig) -> None:
    if config.device == "cuda" and not count_gpus():
        raise ConfigError(
            "config key 'device': cuda is asked for, and there is no GPU that torch could use here; auto takes what there is"
        )
