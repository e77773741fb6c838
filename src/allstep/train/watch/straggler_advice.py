"""What to do about a slow worker, by the mode of the run, with the figures of other modes."""

from allstep.train.watch.straggler_watch import NETWORK, Straggler
from allstep.train.watch.sync_gains import GAIN, times


def advice(found: Straggler, sync: str = "allreduce", *, is_even: bool = True) -> str:
    """Return what to do about a straggler.

    sync: the name of the run's mode. is_even: whether its workers have even shares.
    """
    if found.part == NETWORK:
        return "compare the hosts with `allstep doctor -H`, or use fewer, larger steps (batch)"
    if found.part == "update" and 0 in found.ranks:
        return "worker 0 also logs and saves: set a larger log_every or save.seconds"
    host = "its host" if found.host else "the machine"
    if found.part == "input":
        return f"check the disk of {host}, set more data.workers, or pack the data"
    look = f"look for other processes and a low clock rate on {host} (`allstep doctor`)"
    other = _of_other_modes(found, sync, is_even)
    return f"{look}; {other}" if other else look


def _of_other_modes(found: Straggler, sync: str, is_even: bool) -> str:
    """Return what other modes gain, or this one has gained; "" if nothing is worth it."""
    gains = found.gains
    if gains is None or gains.asynchronous < GAIN:
        return ""
    gain = times(gains.asynchronous)
    if sync in ("allreduce", "server", "local", "diloco"):
        if not is_even:
            return ""
        return (
            f"if it stays slow, asynchronous training (sync=async) gains up to {gain}; uneven"
            f" shares (shares=speed) gain {gains.of_uneven} without staleness"
        )
    uneven = f"uneven shares (sync=allreduce shares=speed) gain {gains.of_uneven} without staleness"
    if sync == "clock":
        return (
            f"with a bound on steps the others wait for it; a bound on ages (sync=stale:2) gains up"
            f" to {gain}, and {uneven}"
        )
    return f"asynchronous steps gain up to {gain} over waiting for it; {uneven}"
