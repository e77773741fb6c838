"""What each event changes in the state of an elastic run.

===================  ===========================================================================
event                change
===================  ===========================================================================
`HostsFound`         the slots that are offered
`HostsSignaled`      to all: forward it and stop; to some hosts: they leave as if withdrawn
`Standby`            the worker can be in the next plan
`Progress`           the time of its last step; its slot has no failures any more
`Ready`              the member waits for the next plan; unless a change was announced, the
                     generation ends, if it has not been ended before
`WorkerExited`       see `_exited`
`StartFailed`        the slot stays empty for a while
`HostLost`           as if all workers of the host had died at once; those that had not started yet
                     as if each could not be started
===================  ===========================================================================

Events about workers that have ended, and those of an earlier generation, change nothing.
"""

from dataclasses import replace

from allstep.launch.cause import Failure
from allstep.launch.roster import continuing
from allstep.launch.roster.actions import ForwardSignal
from allstep.launch.roster.elastic_state import IN_PLAN, WAITING, ElasticState, Stage
from allstep.launch.roster.living_workers import LivingWorker, Phase
from allstep.launch.roster.losses import BAD_INPUT, Loss
from allstep.launch.roster.roster_events import (
    Event,
    HostLost,
    HostsFound,
    HostsSignaled,
    Progress,
    Ready,
    Standby,
    StartFailed,
    WorkerExited,
)
from allstep.launch.roster.stopping import Stopping
from allstep.launch.run_state import RESUBMIT, span


def apply(state: ElasticState, event: Event) -> None:
    """Change the state of a run for one event."""
    match event:
        case HostsFound():
            state.slots.find(event.hosts)
        case HostsSignaled():
            _signaled(state, event)
        case Standby():
            _standby(state, event)
        case Progress():
            _progressed(state, event)
        case Ready():
            _ready(state, event)
        case WorkerExited():
            _exited(state, event)
        case StartFailed():
            _start_failed(state, event)
        case HostLost():
            _host_lost(state, event)


def _standby(state: ElasticState, event: Standby) -> None:
    worker = state.workers.get(event.worker)
    if worker is not None and worker.phase is Phase.STARTING:
        worker.phase = Phase.STANDBY


def _member(state: ElasticState, event: Progress | Ready) -> LivingWorker | None:
    """Return the member of the current generation that an event is about, or None."""
    worker = state.workers.get(event.worker)
    if worker is None or worker.phase is not Phase.MEMBER:
        return None
    return worker if event.generation == state.generation else None


def _progressed(state: ElasticState, event: Progress) -> None:
    if (worker := _member(state, event)) is not None:
        worker.finish_step(event.at, event.updates)
        state.slots.clear_failures(worker.place)


def _ready(state: ElasticState, event: Ready) -> None:
    worker = _member(state, event)
    if worker is None or state.plan is None:
        return
    is_new = worker.number in state.plan.new
    worker.leave_generation(event.updates, state.plan.updates if is_new else 0)
    if state.stage is Stage.RUNNING and (state.announced or state.has_ended):
        state.stage = Stage.ENDED if state.has_ended else Stage.CHANGING
        state.since = event.at
    elif state.stage is Stage.RUNNING:
        state.end_generation(event.at, f"{state.name_of(worker)} has left it", is_cause=False)
    elif state.stopping is not None and state.stopping.lets_save:
        state.release_waiting(event.at)


def _exited(state: ElasticState, event: WorkerExited) -> None:
    """Apply the end of a worker, by what it did and by its exit code.

    An excused worker was dismissed or killed with its host, and one in a slot that is not offered
    any more left with it: no failure. Exit code 0 of another member means that the job is done, 75
    that it has saved and stops. Any other one is a loss. Before there is a plan, workers count as
    members: the command may be one that joins no world.
    """
    worker = state.workers.remove(event.worker)
    if worker is None:
        return
    if worker.is_excused:
        _end_if_in_plan(state, worker, event.at)
    elif state.stopping is not None:
        state.stopping.add_exit(event.code)
    elif worker.phase in WAITING and (state.plan is not None or event.code not in (0, RESUBMIT)):
        _lose_before_joining(state, worker, event)
    elif not state.is_offered(worker, event.at):
        state.left_with.add(event.code)
        _end_if_in_plan(state, worker, event.at)
    elif event.code == 0:
        continuing.note_done(state, worker)
        _finish(state)
    elif event.code == RESUBMIT:
        _stop_after_saving(state, event.at)
    else:
        _lose_member(state, worker, event)


def _end_if_in_plan(state: ElasticState, worker: LivingWorker, at: float) -> None:
    if worker.phase in IN_PLAN:
        state.end_generation(at, f"{state.name_of(worker)} left with its host")


def _finish(state: ElasticState) -> None:
    if state.stage in (Stage.FINISHING, Stage.OVER):
        return
    state.stage = Stage.FINISHING
    # Failed starts from which the run has recovered.
    if state.policy.replaces or state.plan is not None:
        state.losses.before_joining.clear()


def _stop_after_saving(state: ElasticState, at: float) -> None:
    """Stop as the job does by itself; give the other workers the grace time to do the same."""
    stopping = Stopping(at + state.policy.grace, state.verdict())
    stopping.add_exit(RESUBMIT)
    state.stop(stopping)
    state.release_waiting(at)


def _failure(event: WorkerExited, rank: int, host: str) -> Failure:
    errors, oom, blames = event.errors, event.out_of_memory, event.blames
    return Failure(rank, host, event.code, event.at, errors, oom, blames=blames)


def _lose_before_joining(state: ElasticState, worker: LivingWorker, event: WorkerExited) -> None:
    if not state.is_offered(worker, event.at):
        return
    failure = _failure(event, worker.number, worker.host)
    state.losses.before_joining.append(Loss(worker.number, failure, event.signature))
    state.exclude(worker, event.at)
    continuing.lose_before_the_first_plan(state, failure)
    # Later, a host whose files differ must not end the run of the others.
    if state.plan is None and event.code == BAD_INPUT:
        state.doom(event.at)


def _lose_member(state: ElasticState, worker: LivingWorker, event: WorkerExited) -> None:
    failure = _failure(event, state.rank_of(worker), worker.host)
    failure = replace(failure, was_late=worker.is_killed)
    if state.losses.add(Loss(worker.number, failure, event.signature, worker.updates)):
        state.doom(event.at)
    continuing.lose(state, [worker], event.at, f"lost {state.name_of(worker)}: {failure.how}")
    state.exclude(worker, event.at)


def _start_failed(state: ElasticState, event: StartFailed) -> None:
    worker = state.workers.get(event.worker)
    if worker is None or worker.phase not in (Phase.STARTING, Phase.LEAVING):
        return
    state.workers.remove(event.worker)
    if not worker.is_excused and state.stopping is None:
        _fail_to_start(state, worker, event)


def _fail_to_start(
    state: ElasticState, worker: LivingWorker, event: StartFailed | HostLost
) -> None:
    # At the end of a run it is not needed any more.
    if state.is_offered(worker, event.at) and state.stage is not Stage.FINISHING:
        failure = Failure(worker.number, worker.host, 1, event.at, lost=event.why)
        state.losses.before_joining.append(Loss(worker.number, failure))
        state.exclude(worker, event.at, did_not_start=True)
        continuing.lose_before_the_first_plan(state, failure)


def _host_lost(state: ElasticState, event: HostLost) -> None:
    lost = state.workers.on(event.host)
    failed = [each for each in lost if not each.is_excused and state.is_offered(each, event.at)]
    for worker in lost:
        state.workers.remove(worker.number)
    if state.stopping is not None:
        state.stopping.codes += [1 for each in lost if not each.is_excused]
        return
    for worker in failed:
        if worker.phase is Phase.STARTING:
            _fail_to_start(state, worker, event)
        else:
            state.exclude(worker, event.at)
    if members := [each for each in lost if each.phase in IN_PLAN]:
        continuing.lose(state, members, event.at, f"lost host {event.host}: {event.why}")
    _add_lost_ranks(state, [each for each in failed if each.phase in IN_PLAN], event)


def _add_lost_ranks(state: ElasticState, lost: list[LivingWorker], event: HostLost) -> None:
    """Record one failure for all ranks of a host."""
    ranks = sorted(state.rank_of(worker) for worker in lost)
    if ranks:
        why = f"{event.why} ({span(ranks)})"
        failure = Failure(ranks[0], event.host, 1, event.at, lost=why)
        state.losses.add(Loss(lost[0].number, failure))


def _leave_by_signal(state: ElasticState, hosts: tuple[str, ...], number: int) -> None:
    """Record why the members on these hosts leave the current generation."""
    members = state.workers.having(Phase.MEMBER)
    leaving = [host for host in hosts if any(each.host == host for each in members)]
    if leaving and state.stage is Stage.RUNNING:
        state.reason = f"{', '.join(leaving)} received signal {number} and leaves"


def _signaled(state: ElasticState, event: HostsSignaled) -> None:
    if event.hosts is not None:
        for host in event.hosts:
            state.slots.leave(host)
        stays = any(state.is_offered(worker, event.at) for worker in state.workers)
        # Signals that reach all hosts one by one mean the same as one to all.
        if stays or not state.workers:
            _leave_by_signal(state, event.hosts, event.number)
            return
    stopping = state.stopping or Stopping(float("inf"), state.verdict())
    if stopping.forward(event.number, event.at, state.policy.grace):
        state.actions.append(ForwardSignal(event.number))
    if state.stopping is None:
        state.stop(stopping)
        state.release_waiting(event.at)
