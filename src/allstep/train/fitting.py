"""Keys of a config that must fit each other, or this machine: what pydantic cannot see, told before anything is started.

Each check is one line for the user, with the figures. What needs the data is in `prepare`.
"""

from collections.abc import Callable, Sequence

from allstep.data.spelled import check_mix, spelled
from allstep.errors import ConfigError
from allstep.models.by_name import check_name
from allstep.train.config import RunConfig
from allstep.train.workers import count_gpus


def check_config(config: RunConfig, num_workers: int | None = None) -> None:
    """ConfigError when no data could make this a run that can run.

    What is said of the batch is checked when the batch is known: it may depend on the number of workers.
    """
    check_name(config.model.name)
    for check in (_operations, _data, _device):
        check(config)
    if config.batch_per_worker is None or num_workers is not None:
        for check in (_ghost, _pieces, _schedule, _growth):
            check(config.resolved(num_workers or 1))


def _ghost(config: RunConfig) -> None:
    section, batch = config.model, config.global_batch
    if section.norm == "ghost" and section.ghost > batch:
        raise ConfigError(
            f"config key 'model.ghost': a ghost batch of {section.ghost} samples is larger than the batch, which has {batch}"
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
    _check_epochs("schedule.milestones", section.milestones, config.num_epochs)


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
