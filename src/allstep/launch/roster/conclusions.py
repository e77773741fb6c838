"""Why an elastic run ends: exit codes and the texts that the launcher prints last."""

from collections.abc import Sequence

from allstep.launch import cause
from allstep.launch.cause import Failure
from allstep.launch.roster.elastic_policy import Policy
from allstep.launch.roster.losses import Loss, Losses
from allstep.launch.run_events import Conclusion
from allstep.launch.run_state import RESUBMIT

_PREFIX = "allstep run: "

HOROVODS_TEXT = f"{_PREFIX}one or more processes exited with non-zero status"
"""The last line under horovodrun, for which scripts search."""


def failed(failures: Sequence[Failure], size: int, num_stopped: int) -> Conclusion:
    """Return the end of a run by the failures of a generation of `size` members."""
    first = cause.first(failures)
    return Conclusion(first.exit_code, cause.report(first, size, num_stopped))


def no_state_left(losses: Losses, size: int, generation: int, left_with: set[int]) -> Conclusion:
    """Return the end of a run whose members have all ended.

    left_with: exit codes of those that left with their hosts. If all of them were done or have
    saved, the run is or has, too.
    """
    text = (
        f"{_PREFIX}no state left: all {size} workers of generation {generation} have ended or hold"
        # Horovod's text, for which scripts search.
        " no state; unable to broadcast state; start again from the last checkpoint"
    )
    if not losses.failures and left_with == {0}:
        return Conclusion(0)
    if not losses.failures:
        return Conclusion(RESUBMIT if RESUBMIT in left_with else 1, text)
    report = failed(losses.failures, size, 0)
    if losses.are_alike(size):
        return report
    return Conclusion(report.code, f"{report.text}\n{text}")


def not_enough(policy: Policy, num_standby: int, num_slots: int, losses: Losses) -> Conclusion:
    """Return the end of a run that could not form generation 0."""
    text = (
        f"{_PREFIX}{num_standby} of {policy.num_workers} workers are on standby and the hosts have"
        f" {num_slots} usable slots; waited at most {policy.elastic_timeout:g} s"
        " (--elastic-timeout): add hosts, or lower -np"
    )
    if not losses.before_joining:
        return Conclusion(1, text)
    first = before_joining(losses.before_joining)
    return Conclusion(first.code, f"{first.text}\n{text}")


def before_joining(losses: Sequence[Loss]) -> Conclusion:
    """Return the report of the first failure of workers that were in no world yet."""
    first = cause.first(loss.failure for loss in losses)
    worker = next(loss.worker for loss in losses if loss.failure is first)
    lines = [
        "",
        f"{_PREFIX}worker {worker} on {first.host} failed before it joined: {first.how}, "
        f"{first.moment:.1f} s after the start",
        *(f"  {line}" for line in cause.last_error_lines(first.errors)),
    ]
    return Conclusion(first.exit_code, "\n".join(lines))


def below_minimum(policy: Policy, num_left: int) -> str:
    """Return the text of a run that waited too long for more workers.

    num_left: workers that could continue: they are ready, and on hosts that are still offered.
    """
    return (
        f"{_PREFIX}{num_left} workers can continue, the minimum is {policy.min_workers}, and not"
        f" enough others joined within {policy.elastic_timeout:g} s (--elastic-timeout); start"
        " again when there are more hosts"
    )


def will_not_end(policy: Policy, name: str) -> str:
    """Return the text of a run that waited too long for the end of a killed member."""
    return (
        f"{_PREFIX}{name} has not ended {policy.elastic_timeout:g} s (--elastic-timeout) after the"
        " end of its generation, although it was killed: check that host, then start again"
    )


def reset_limit(limit: int) -> Conclusion:
    """Return the end of a run with too many changes of its world."""
    return Conclusion(1, f"{_PREFIX}number of resets during elastic job exceeded limit ({limit})")


def blacklist_rule(host: str) -> str:
    """Return the warning about Horovod's rule that has ended a run on a single host."""
    return (
        f"{_PREFIX}as under horovodrun, a failing worker excludes its whole host, and {host} is the"
        " only one: no worker is left. `allstep run --min-np` replaces the failed worker instead"
    )
