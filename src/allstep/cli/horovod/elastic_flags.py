"""The flags of elastic runs: `--min-np` switches one on, the others are its options."""

from typing import TYPE_CHECKING, Any

from allstep.errors import ConfigError

if TYPE_CHECKING:
    from allstep.launch.roster import Policy

_OPTIONS = ("max_np", "elastic_timeout", "reset_limit", "blacklist_cooldown_range")


def is_elastic(flags: dict[str, Any]) -> bool:
    """Return whether the flags ask for a run that continues when a worker is lost."""
    return flags.get("min_np") is not None


def idle_options(flags: dict[str, Any]) -> list[str]:
    """Return the given options of elastic runs, if the run is not elastic."""
    if is_elastic(flags):
        return []
    return [f"--{name.replace('_', '-')}" for name in _OPTIONS if flags.get(name) is not None]


def policy_of(
    flags: dict[str, Any], num_workers: int, grace: float, *, as_horovodrun: bool
) -> "Policy":
    """Return the policy of an elastic run of `num_workers` workers; ConfigError if it cannot be.

    as_horovodrun: a failing worker excludes its whole host, as in Horovod.
    """
    from allstep.launch.roster import Policy

    cooldown = flags.get("blacklist_cooldown_range")
    timeout = flags.get("elastic_timeout")
    try:
        return Policy(
            num_workers,
            flags["min_np"],
            flags.get("max_np"),
            elastic_timeout=600.0 if timeout is None else float(timeout),
            reset_limit=flags.get("reset_limit"),
            blacklist=as_horovodrun,
            cooldown_range=cooldown if as_horovodrun else None,
            grace=grace,
        )
    except ValueError as error:
        given = f"--min-np {flags['min_np']}"
        if flags.get("max_np") is not None:
            given += f" --max-np {flags['max_np']}"
        raise ConfigError(f"-np {num_workers} {given}: {error}") from error
