"""The flags of elastic runs: `--min-np` switches one on, the others are its options.

Under horovodrun a discovery script alone switches it on too; `-np` is then also the minimum. So
does an asynchronous mode in ALLSTEP_SYNC, whose runs continue without lost workers.
"""

import os
from typing import TYPE_CHECKING, Any

from allstep.errors import ConfigError
from allstep.limits import read_seconds

if TYPE_CHECKING:
    from allstep.launch.hosts.discovery import Discovery
    from allstep.launch.roster import Policy

_OPTIONS = ("max_np", "elastic_timeout", "reset_limit", "blacklist_cooldown_range")
# horovodrun: members are notified of a new worker when it waits for a world, but not later than
# this: scripts wait 2 to 3 s for the message after the discovery script has listed a host.
_NOTIFY_SECONDS = 1.0


def with_minimum(
    flags: dict[str, Any], num_workers: int | None, *, as_horovodrun: bool
) -> dict[str, Any]:
    """Return the flags; with horovodrun's minimum if a discovery script makes the run elastic."""
    if not as_horovodrun or not flags.get("host_discovery_script") or is_elastic(flags):
        return flags
    if num_workers is None:
        raise ConfigError(
            "the number of workers is missing: give -np N, for as many as the job needs to start"
        )
    return {**flags, "min_np": num_workers}


def with_max_failures(flags: dict[str, Any], given: int | None) -> dict[str, Any]:
    """Return the flags with --max-failures, which horovodrun does not have.

    Raises ConfigError if the run is not elastic.
    """
    if given is None:
        return flags
    if not is_elastic(flags):
        raise ConfigError(
            f"--max-failures {given} needs an elastic run; add --min-np N, the least number of"
            " workers to continue with"
        )
    return {**flags, "max_failures": given}


def is_elastic(flags: dict[str, Any]) -> bool:
    """Return whether the flags ask for a run that continues when a worker is lost."""
    return flags.get("min_np") is not None


def discovery_of(flags: dict[str, Any]) -> "Discovery | None":
    """Return the discovery script of an elastic run; None if its hosts are fixed."""
    from allstep.launch import Discovery

    script = flags.get("host_discovery_script")
    if not script or not is_elastic(flags):
        return None
    return Discovery.given(script, flags.get("slots_per_host", 1), os.environ)


def idle_options(flags: dict[str, Any], *, as_horovodrun: bool) -> str:
    """Return the given options of elastic runs that have no effect, with the reason; "" if none."""
    if not is_elastic(flags):
        names = [f"--{name.replace('_', '-')}" for name in _OPTIONS if flags.get(name) is not None]
        return f"{', '.join(names)} (an elastic run needs --min-np)" if names else ""
    if flags.get("blacklist_cooldown_range") is not None and not as_horovodrun:
        return "--blacklist-cooldown-range (only horovodrun blacklists hosts)"
    if flags.get("max_failures") is not None and as_horovodrun:
        return "--max-failures (horovodrun blacklists the host of a worker that fails once)"
    return ""


def policy_of(
    flags: dict[str, Any], num_workers: int, grace: float, sync: str = "", *, as_horovodrun: bool
) -> "Policy | None":
    """Return the policy of an elastic run of `num_workers` workers; ConfigError if it cannot be.

    None for a fixed world. sync: the mode in ALLSTEP_SYNC, "" for none. as_horovodrun: a failing
    worker excludes its whole host, as in Horovod.
    """
    from allstep.launch.roster import MAX_FAILURES, Policy
    from allstep.parallel.sync_mode import VARIABLE, sync_mode

    mode = sync_mode(sync or "allreduce", VARIABLE)
    # A script whose workers average weights waits for all of them, unless it is elastic itself.
    survives = mode.survives_lost_party and not mode.has_equal_steps
    if not is_elastic(flags):
        return Policy.continuing(num_workers, grace) if survives and num_workers > 1 else None
    cooldown = flags.get("blacklist_cooldown_range")
    timeout = flags.get("elastic_timeout")
    if timeout is None:
        timeout = read_seconds(os.environ, ("HOROVOD_ELASTIC_TIMEOUT",), 600.0)
    try:
        return Policy(
            num_workers,
            flags["min_np"],
            flags.get("max_np"),
            max_failures=flags.get("max_failures", MAX_FAILURES),
            elastic_timeout=float(timeout),
            reset_limit=flags.get("reset_limit"),
            blacklist=as_horovodrun,
            cooldown_range=cooldown if as_horovodrun else None,
            notify_after=_NOTIFY_SECONDS if as_horovodrun else None,
            grace=grace,
        )
    except ValueError as error:
        given = f"--min-np {flags['min_np']}"
        if flags.get("max_np") is not None:
            given += f" --max-np {flags['max_np']}"
        raise ConfigError(f"-np {num_workers} {given}: {error}") from error
