"""A run that continues without lost workers and starts no others (`Policy.continuing`).

It is for modes in which workers do not wait for each other at every step. So nothing has to stop
because one of them died:

```
            a member is lost                      the first member leaves
  RUNNING --------------------> RUNNING ---------------------------------> CHANGING or ENDED
            NotifyChange,          |   when it can: after its push, or           |
            ReportLoss             |   where it meets the others                 v
                                   |                                     the next plan, without
                                   +--> a member exits with 0:           the lost worker
                                        FINISHING, without a new world
```

- A loss is a request to leave the generation in order, and only the first member that leaves
  starts the grace time of the others. A script that never leaves works on without the lost worker.
- A generation is ended at once as long as a member has not finished a step in it: it may wait for
  the lost worker while groups are formed, which no other notice ends.
- Before the first world, the workers that are left form it.
- The run has succeeded when the lowest rank that lived at the first exit with 0 has exited with 0
  too: it has the duties of rank 0. A worker that is lost before or after does not matter.
"""

from collections.abc import Sequence

from allstep.launch.cause import Failure
from allstep.launch.roster.actions import NotifyChange, ReportLoss
from allstep.launch.roster.elastic_state import (
    FORMING,
    IN_PLAN,
    WAITING,
    ElasticState,
    Stage,
)
from allstep.launch.roster.living_workers import LivingWorker


def lose(state: ElasticState, lost: Sequence[LivingWorker], at: float, reason: str) -> None:
    """Let the members of the current generation leave it, because of lost ones.

    lost: members that are not among the living workers any more.
    """
    others = [each for each in state.workers.having(*IN_PLAN) if not each.is_killed]
    if state.policy.replaces or not others or state.doomed_at is not None:
        state.end_generation(at, reason)
        return
    if state.stopping is None:
        _report(state, reason, at, len(others))
    if state.stage in FORMING or not all(each.has_stepped for each in others):
        state.end_generation(at, reason)
    elif state.stage is Stage.RUNNING and not state.has_ended:
        state.announced |= {each.number for each in lost}
        state.give_reason(reason)
        state.actions.append(NotifyChange(state.generation, "shrink"))


def lose_before_the_first_plan(state: ElasticState, failure: Failure) -> None:
    """Report a worker that will be missing in the first world."""
    num_left = len(state.workers.having(*WAITING))
    if state.stage is Stage.STARTING and not state.policy.replaces and num_left:
        who = f"worker {failure.rank} on {failure.host} failed before it joined: {failure.how}"
        _report(state, who, failure.moment, num_left)


def num_to_start_with(state: ElasticState) -> int:
    """Return how many workers the first world needs: without replacements, those that are left."""
    if state.policy.replaces or not state.losses.before_joining:
        return state.policy.num_workers
    left = [each for each in state.workers.having(*WAITING) if not each.is_killed]
    return min(len(left), state.policy.num_workers)


def note_done(state: ElasticState, worker: LivingWorker) -> None:
    """Record that a member exited with 0. worker: not among the living ones any more."""
    if state.policy.replaces or worker.phase not in IN_PLAN:
        return
    if state.keeper is None:
        members = [worker, *state.workers.having(*IN_PLAN)]
        state.keeper = min(members, key=state.rank_of).number
    state.is_done |= worker.number == state.keeper


def _report(state: ElasticState, what: str, at: float, num_left: int) -> None:
    workers = "1 worker continues" if num_left == 1 else f"{num_left} workers continue"
    state.actions.append(ReportLoss(f"{what}; {at:.1f} s after the start; {workers} without it"))
