"""What an elastic run does when its state allows it or when time has passed.

`act` is called after the events of a moment were applied. `timers` yields the times at which it
would do something without another event.
"""

import signal
from collections.abc import Iterator

from allstep.launch.roster import conclusions, continuing, form_plan
from allstep.launch.roster.actions import (
    ForwardSignal,
    NotifyChange,
    Plan,
    Publish,
    StartWorker,
)
from allstep.launch.roster.elastic_state import (
    FORMING,
    IN_PLAN,
    WAITING,
    WORKING,
    ElasticState,
    Stage,
)
from allstep.launch.roster.living_workers import LivingWorker, Phase
from allstep.launch.roster.stopping import STOP_SECONDS, Stopping
from allstep.launch.run_events import Conclusion
from allstep.launch.run_state import RESUBMIT

# Waits for the cause of an error of the program, as in `run_state`.
_SETTLE_SECONDS = 0.25
_CAUSE_SECONDS = 2.0


def act(state: ElasticState, now: float) -> None:
    """Do everything that the state of a run allows or requires now."""
    _dismiss_withdrawn(state, now)
    _kill_late(state, now)
    if state.doomed_at is not None and state.stage in (*WORKING, Stage.FINISHING):
        _settle(state, now)
    if state.doomed_at is None:
        _form(state, now)
        _announce(state, now)
        _start_workers(state, now)
    if state.stage is Stage.FINISHING:
        _finish(state, now)
    if state.stage is Stage.STOPPING:
        _end_run(state, now)


def timers(state: ElasticState, now: float) -> Iterator[float]:
    """Yield times of later actions; times that are not after `now` have no meaning."""
    for worker in state.workers.having(Phase.LEAVING):
        yield worker.leave_by
    if state.doomed_at is not None and state.stage in (*WORKING, Stage.FINISHING):
        yield state.doomed_at + _settle_seconds(state)
    elif state.stage in WORKING:
        yield from _forming_timers(state)
        if _room(state, now) > 0:
            yield from state.slots.timers(state.workers.taken, now)
    if state.stage is Stage.FINISHING and _must_finish(state):
        yield state.since + state.policy.elastic_timeout
    if state.stopping is not None and state.stage is Stage.STOPPING:
        yield min(state.stopping.kill_at, state.stopping.give_up_at)
        yield state.stopping.give_up_at


def _forming_timers(state: ElasticState) -> Iterator[float]:
    if state.stage is not Stage.RUNNING:
        yield state.since + state.policy.elastic_timeout
    if state.stage is Stage.STARTING:
        yield state.since + state.policy.start_timeout
    if state.stage in FORMING:
        yield from (_answer_by(state, each) for each in state.workers.having(Phase.MEMBER))
    if state.stage is Stage.CHANGING:
        yield state.since + state.policy.join_timeout
    if state.policy.notify_after is not None:
        for worker in state.workers.having(Phase.STARTING):
            yield worker.started_at + state.policy.notify_after


# Workers that must go.


def _dismiss_withdrawn(state: ElasticState, now: float) -> None:
    """Dismiss workers on standby whose slots are not offered any more; members leave in order."""
    if state.stage in WORKING:
        for worker in state.workers.having(*WAITING):
            if not worker.is_killed and not state.is_offered(worker, now):
                state.dismiss(worker, now)


def _answer_by(state: ElasticState, worker: LivingWorker) -> float:
    """Return until when a member must be ready."""
    return state.since + state.policy.grace_of(worker.step_seconds)


def _kill_late(state: ElasticState, now: float) -> None:
    for worker in state.workers.having(Phase.LEAVING):
        if now >= worker.leave_by:
            state.kill(worker)
    if state.stage not in FORMING:
        return
    late = [each for each in state.workers.having(Phase.MEMBER) if now >= _answer_by(state, each)]
    if state.stage is Stage.ENDED:
        for worker in late:
            state.kill(worker)
    elif late:
        # The others have left in order; this one gets the grace time again, from now on.
        state.end_generation(now, f"{state.name_of(late[0])} has not left it in time")


# The next world.


def _form(state: ElasticState, now: float) -> None:
    if state.stage is Stage.STARTING:
        _form_first(state, now)
    elif state.stage in FORMING:
        _form_next(state, now)


def _form_first(state: ElasticState, now: float) -> None:
    policy, candidates = state.policy, state.candidates(now)
    # Slots that were given up do not return, except with another list of hosts.
    expected = state.slots.expected(now)
    is_hopeless = policy.replaces and state.slots.num_given_up > 0 and expected < policy.num_workers
    num_needed = continuing.num_to_start_with(state)
    if not num_needed:
        _fail(state, conclusions.before_joining(state.losses.before_joining), now)
    elif len(candidates.standby) >= num_needed:
        plan = form_plan.first_plan(candidates.standby, policy, candidates.hosts)
        _publish(state, plan, now)
    elif is_hopeless or now >= state.since + _first_timeout(state):
        num_standby = len(candidates.standby)
        end = conclusions.not_enough(policy, num_standby, expected, state.losses)
        _fail(state, _as_horovodrun(state, end), now)


def _first_timeout(state: ElasticState) -> float:
    """Return how long to wait for generation 0."""
    num_coming = sum(not worker.is_killed for worker in state.workers.having(*WAITING))
    policy = state.policy
    is_enough = num_coming >= continuing.num_to_start_with(state)
    return policy.start_timeout if is_enough else policy.elastic_timeout


def _form_next(state: ElasticState, now: float) -> None:
    """Publish the next plan, once no member of the last one can act any more."""
    assert state.plan is not None
    candidates = state.candidates(now)
    if not state.may_act():
        if not candidates.holders:
            size = len(state.plan.members)
            end = conclusions.no_state_left(state.losses, size, state.generation, state.left_with)
            _fail(state, _as_horovodrun(state, end), now)
            return
        limit = state.policy.reset_limit
        # Each plan after the first is a reset.
        if limit is not None and state.generation >= limit:
            _fail(state, conclusions.reset_limit(limit), now)
            return
        selection = form_plan.select(candidates, state.policy)
        if selection is not None and not _awaits_announced(state, now):
            _publish_next(state, candidates, selection, now)
            return
    if now >= state.since + state.policy.elastic_timeout:
        _save(state, now)


def _awaits_announced(state: ElasticState, now: float) -> bool:
    """Return whether to wait for workers that were announced before they were on standby.

    Members that left for them in order would else form the same world again.
    """
    if state.stage is Stage.ENDED or now >= state.since + state.policy.join_timeout:
        return False
    starting = state.workers.having(Phase.STARTING)
    return any(worker.number in state.announced for worker in starting)


def _publish_next(
    state: ElasticState,
    candidates: form_plan.Candidates,
    selection: form_plan.Selection,
    now: float,
) -> None:
    leaving = [worker for worker in candidates.ready if worker not in selection.stay]
    reason = state.reason or f"{len(selection.join)} workers join, {len(leaving)} leave"
    plan = form_plan.next_plan(selection, candidates, state.generation + 1, reason)
    for worker in leaving:
        state.dismiss(worker, now)
    _publish(state, plan, now)


def _publish(state: ElasticState, plan: Plan, now: float) -> None:
    state.plan, state.stage = plan, Stage.RUNNING
    state.reason, state.has_ended, state.has_cause = "", False, False
    state.announced.clear()
    state.left_with.clear()
    state.losses.start_generation()
    for number in plan.members:
        worker = state.workers.get(number)
        assert worker is not None
        worker.join(now)
    state.actions.append(Publish(plan))


def _announce(state: ElasticState, now: float) -> None:
    """Notify the members of workers that can join or must leave, once for each worker."""
    # Members of a generation that was ended leave it anyway.
    if state.stage is not Stage.RUNNING or state.has_ended:
        return
    members = state.workers.having(Phase.MEMBER)
    leave = {each.number for each in members if not state.is_offered(each, now)}
    room = state.policy.room_for(len(members) - len(leave))
    waiting = state.in_slot_order([each for each in state.workers if _can_join(state, each, now)])
    join = {each.number for each in waiting[: int(min(room, len(waiting)))]}
    if (join | leave) - state.announced:
        state.announced |= join | leave
        kind = "mixed" if join and leave else "grow" if join else "shrink"
        state.actions.append(NotifyChange(state.generation, kind))


def _can_join(state: ElasticState, worker: LivingWorker, now: float) -> bool:
    """Return whether to announce a worker: on standby, or started long enough ago."""
    if worker.is_killed or not state.is_offered(worker, now):
        return False
    after = state.policy.notify_after
    is_due = after is not None and now >= worker.started_at + after
    return worker.phase is Phase.STANDBY or (worker.phase is Phase.STARTING and is_due)


# Starts.


def _room(state: ElasticState, now: float) -> float:
    """Return how many workers may be started. Those that leave or die do not count any more."""
    if not state.policy.replaces:
        return state.policy.num_workers - state.workers.num_started
    stay = [
        each
        for each in state.workers.having(*WAITING, *IN_PLAN)
        if state.is_offered(each, now) and not each.is_killed
    ]
    return state.policy.room_for(len(stay)) + state.policy.spares


def _start_workers(state: ElasticState, now: float) -> None:
    if state.stage not in WORKING:
        return
    free = state.slots.free(now, state.workers.taken)
    for place in free[: max(0, int(min(_room(state, now), len(free))))]:
        worker = state.workers.start(place, now)
        state.actions.append(StartWorker(worker.number, *place))


# The end of the run.


def _finish(state: ElasticState, now: float) -> None:
    """Wait for the members to end; no plan will follow for those that wait for one."""
    for worker in state.workers.having(Phase.STANDBY, Phase.READY):
        state.dismiss(worker, now)
    if state.plan is not None:
        for worker in state.workers.having(Phase.STARTING):
            state.dismiss(worker, now)
    if not state.workers:
        state.finish(_as_horovodrun(state, state.verdict() or Conclusion(0)))
    elif _must_finish(state) and now >= state.since + state.policy.elastic_timeout:
        _fail(state, _as_horovodrun(state, state.verdict() or Conclusion(1)), now)


def _must_finish(state: ElasticState) -> bool:
    """Return whether the members must end in time, because one of them was lost."""
    return state.has_ended and state.policy.replaces


def _settle_seconds(state: ElasticState) -> float:
    """Return how long to wait for the cause, from the error of the program on."""
    losses = state.losses.of_members or state.losses.before_joining
    may_follow = all(loss.failure.may_follow for loss in losses)
    return _CAUSE_SECONDS if may_follow and len(state.workers) > 0 else _SETTLE_SECONDS


def _settle(state: ElasticState, now: float) -> None:
    assert state.doomed_at is not None
    if now >= state.doomed_at + _settle_seconds(state):
        _fail(state, _as_horovodrun(state, state.verdict() or Conclusion(1)), now)


def _as_horovodrun(state: ElasticState, end: Conclusion) -> Conclusion:
    """Add what horovodrun prints, if a failure ends the run: its text, and its rule on one host."""
    if not state.policy.blacklist or not end.code:
        return end
    lines, hosts = [end.text], state.slots.hosts
    if len(hosts) == 1 and state.slots.is_blacklisted(hosts[0]):
        lines.append(conclusions.blacklist_rule(hosts[0]))
    if state.losses.of_members or state.losses.before_joining:
        lines.append(conclusions.HOROVODS_TEXT)
    return Conclusion(end.code, "\n".join(lines))


def _fail(state: ElasticState, conclusion: Conclusion, now: float) -> None:
    """End the run with SIGTERM to all workers, SIGKILL 3 s later."""
    state.stop(Stopping(now + min(state.policy.grace, STOP_SECONDS), conclusion))
    if state.workers:
        state.actions.append(ForwardSignal(signal.SIGTERM))


def _save(state: ElasticState, now: float) -> None:
    """End a run that has too few workers, after one of them has saved the state."""
    ready, stuck = state.workers.having(Phase.READY), state.may_act()
    num_left = sum(state.is_offered(worker, now) for worker in ready)
    text = conclusions.below_minimum(state.policy, num_left)
    if stuck:
        text = conclusions.will_not_end(state.policy, state.name_of(stuck[0]))
    text = _as_horovodrun(state, Conclusion(RESUBMIT, text)).text
    state.stop(Stopping(now + state.policy.grace, None, text))
    state.release_waiting(now)


def _end_run(state: ElasticState, now: float) -> None:
    stopping = state.stopping
    assert stopping is not None
    if now >= stopping.kill_at and not stopping.is_killing:
        stopping.kill(now)
        for worker in state.workers:
            state.kill(worker)
    if not state.workers or now >= stopping.give_up_at:
        state.finish(stopping.conclusion(len(state.workers)))
