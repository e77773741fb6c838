"""Checks that the section `sync` of a config fits its other keys.

Each check raises a message of one line: what was found, why it does not fit, what to change.
"""

from allstep.errors import ConfigError
from allstep.train.config.run_config import ResolvedConfig, RunConfig
from allstep.train.config.sync_config import SyncConfig
from allstep.world import World


def check_sync(config: ResolvedConfig) -> None:
    """Raise ConfigError if the mode of the run does not fit its model, optimizer or workers."""
    _common(config)
    if config.sync.mode.name == "server":
        _server(config)
    elif config.sync.mode.name in ("local", "diloco"):
        _averages(config)
    elif not config.sync.mode.has_equal_steps:
        _pushes(config)


def _common(config: ResolvedConfig) -> None:
    section = config.sync
    is_push = not section.mode.has_equal_steps
    if section.correct != "none" and not is_push:
        raise ConfigError(
            f"sync.correct={section.correct} corrects stale gradients, and sync={section.name} has"
            " none: omit it, or set sync=async or sync=stale:2"
        )
    if not section.scale and not is_push:
        raise ConfigError(
            f"sync.scale=false is for pushes of a share of the batch, and an update of"
            f" sync={section.name} has the whole batch: omit it, or set sync=async or sync=stale:2"
        )
    _elastic(section)
    if section.mode.name != "diloco":
        for name in ("outer_lr", "outer_momentum"):
            if getattr(section, name) is not None:
                raise ConfigError(
                    f"sync.{name} is for the outer step of DiLoCo, and sync={section.name} has"
                    " none: omit it, or set sync=diloco:32"
                )
    if section.compresses:
        _compressed(config)


def _compressed(config: ResolvedConfig) -> None:
    """Check a run that compresses gradients between hosts: the owners of ranges exchange them."""
    found = f"sync.compress={config.sync.compress}"
    if config.sync.mode.name != "allreduce":
        raise ConfigError(
            f"{found} compresses the gradients that hosts exchange with sync=allreduce, and this"
            f" run has sync={config.sync.name}: omit one of them"
        )
    for is_set, name, why in (
        (
            config.share_weights is False,
            "share_weights=false",
            "the owner of a range encodes the sum of its host, so its workers share the weights;"
            " omit share_weights",
        ),
        (
            config.precision == "float16",
            "precision=float16",
            "float16 needs whole gradients to detect an overflow; set precision=bfloat16",
        ),
        (
            config.optimizer.noise > 0,
            "gradient noise",
            "it needs the whole gradient on each worker; omit optimizer.noise",
        ),
    ):
        if is_set:
            raise ConfigError(f"{found} and {name} exclude each other: {why}, or sync.compress")


def _elastic(section: SyncConfig) -> None:
    """Check the keys that belong to `elastic:H`, or do not."""
    if section.mode.name != "elastic":
        if section.alpha is not None:
            raise ConfigError(
                f"sync.alpha is how far a worker and the center of sync=elastic:H move, and"
                f" sync={section.name} has no center: omit it, or set sync=elastic:8"
            )
        return
    for key, is_set in (("correct", section.correct != "none"), ("scale", not section.scale)):
        if is_set:
            raise ConfigError(
                f"sync.{key}={getattr(section, key)} is for pushes of gradients, and with"
                f" sync={section.name} workers push differences of weights: omit it, or set"
                " sync=async"
            )


def synchronous(config: ResolvedConfig) -> ResolvedConfig:
    """Return the config with steps that all workers make together, for a check of single steps."""
    if config.sync.mode.name in ("allreduce", "server") and not config.sync.compresses:
        return config
    return config.model_copy(update={"sync": SyncConfig()})


def check_replacements(config: RunConfig) -> None:
    """Raise ConfigError if the mode cannot be trained in an elastic run with replacements."""
    if not config.sync.mode.has_equal_steps:
        raise ConfigError(
            f"sync={config.sync.name}: lost workers cannot be replaced yet, and the run continues"
            " without them anyway: omit --min-workers (--min-np of `allstep run`), or set"
            " sync=allreduce"
        )


def check_hosts(config: RunConfig, world: World) -> None:
    """Raise ConfigError if mode, parties and compression do not fit the hosts of the workers."""
    if config.sync.compresses and world.local_size == world.size:
        raise ConfigError(
            f"sync.compress={config.sync.compress} compresses what crosses hosts, and this run has"
            " one host, where workers share memory: omit it, or start workers on several hosts"
        )
    is_single = config.sync.parties == "hosts" and world.local_size == world.size > 1
    if is_single and config.sync.name not in ("allreduce", "server"):
        raise ConfigError(
            f"sync.parties=hosts makes one party of the {world.size} workers of this host, and"
            f" sync={config.sync.name} is for several: omit sync.parties, so that each worker is a"
            " party, or set sync=allreduce"
        )
    if not config.sync.mode.has_equal_steps and world.local_size != world.size:
        raise ConfigError(
            f"sync={config.sync.name} is available on one host only so far, and this one has"
            f" {world.local_size} of the {world.size} workers: start all on one host, or set"
            " sync=allreduce"
        )


def _server(config: ResolvedConfig) -> None:
    if config.share_weights is False:
        raise ConfigError(
            "sync=server and share_weights=false exclude each other: the owner of a slice updates"
            " the only copy of it on the host; omit share_weights, or set sync=allreduce, which has"
            " the same bits"
        )
    if config.precision == "float16":
        raise ConfigError(
            "sync=server and precision=float16 exclude each other: float16 needs whole gradients to"
            " detect an overflow; set precision=bfloat16, or sync=allreduce"
        )


Conflict = tuple[bool, str, str]
"""Whether a setting conflicts with the mode, its name, and why it does."""


def _refuse(config: ResolvedConfig, *conflicts: Conflict) -> None:
    """Raise ConfigError for the first conflict that the config has."""
    for is_set, found, why in conflicts:
        if is_set:
            raise ConfigError(
                f"{found} and sync={config.sync.name} exclude each other: {why}, or set"
                " sync=allreduce"
            )


def _float16(config: ResolvedConfig) -> Conflict:
    return (
        config.precision == "float16",
        "precision=float16",
        "a loss scale is common to all workers; set precision=bfloat16 or float32",
    )


def _noise(config: ResolvedConfig) -> tuple[Conflict, Conflict]:
    return (
        (
            config.noise_scale or config.growth.by_noise,
            "the noise scale",
            "it is measured on gradients at equal weights; omit noise_scale and growth.by_noise",
        ),
        (
            config.optimizer.noise > 0 or config.optimizer.noise_like is not None,
            "gradient noise",
            "its variance is that of an update from a whole batch; omit optimizer.noise and"
            " optimizer.noise_like",
        ),
    )


def _averages(config: ResolvedConfig) -> None:
    """Check a mode in which each worker updates its own weights between two averages."""
    name, from_epoch = config.sync.name, config.sync.mode.from_epoch
    _refuse(
        config,
        (
            config.model.norm in ("sync", "ghost"),
            f"model.norm={config.model.norm}",
            "its statistics are over the samples of all workers, which step alone; set"
            " model.norm=batch or group",
        ),
        _float16(config),
        (
            config.share_weights is True,
            "share_weights=true",
            "between two averages each worker has other weights; omit it",
        ),
        *_noise(config),
    )
    if from_epoch and from_epoch >= config.num_epochs:
        raise ConfigError(
            f"sync={name} averages from epoch {from_epoch} on, and the run has"
            f" {config.num_epochs}: set a smaller epoch, or sync=allreduce"
        )


def _pushes(config: ResolvedConfig) -> None:
    """Check a mode in which each party pushes by itself."""
    _refuse(
        config,
        (
            config.model.norm in ("sync", "ghost"),
            f"model.norm={config.model.norm}",
            "its statistics are over the samples of all workers, which do not step together; set"
            " model.norm=batch or group",
        ),
        _float16(config),
        (
            config.shares != "even",
            "shares",
            "samples are claimed, so a fast worker processes more anyway; omit shares",
        ),
        (
            config.share_weights is True,
            "share_weights=true",
            "each party computes on a copy of the weights that does not change meanwhile; omit it",
        ),
        (
            config.ema.decay is not None,
            "ema.decay",
            "between two synchronization points there is no common series of weights; omit it",
        ),
        *_noise(config),
    )
    _scaled_twice(config)


def _scaled_twice(config: ResolvedConfig) -> None:
    """Raise ConfigError if both the share and the staleness divide the learning rate."""
    if config.sync.correct == "lr" and config.sync.scale:
        raise ConfigError(
            "the learning rate is scaled twice: sync.scale=true multiplies that of a push by its"
            " samples / batch, and sync.correct=lr divides it by the staleness, which is about as"
            " large; set sync.scale=false, or sync.correct=none"
        )
