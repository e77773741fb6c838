"""Growth, and hosts that are withdrawn, in order: nothing is a failure."""

from allstep.launch.roster.actions import (
    Dismiss,
    EndGeneration,
    KillWorker,
    NotifyChange,
    SaveAndExit,
    StartWorker,
)
from allstep.launch.roster.roster_events import HostsFound, Ready, WorkerExited
from support.roster_scenario import Scenario, finished, listed, of_type, published


def lists(now: float, hosts: str) -> HostsFound:
    return HostsFound(now, listed(hosts))


# Growth.


def test_a_new_host_grows_the_world_at_a_step_boundary() -> None:
    run = Scenario("a:2", num=2).running(2)
    assert run.at(2.0, lists(2.0, "a:2 b:2")) == [StartWorker(2, "b", 0), StartWorker(3, "b", 1)]
    assert run.standby(5.0, 2) == [NotifyChange(0, "grow")]
    assert run.standby(5.1, 3) == [NotifyChange(0, "grow")]
    assert run.at(5.2) == [], "once for each worker"
    assert run.ready(6.0, 0) == [], "the others leave in order"
    plan = published(run.ready(6.1, 1))
    assert (plan.members, plan.source, plan.new) == ((0, 1, 2, 3), 0, (2, 3))
    assert plan.reason == "2 workers join, 0 leave"


def test_growth_stops_at_the_maximum() -> None:
    run = Scenario("a:2", num=2, most=3).running(2)
    assert run.at(2.0, lists(2.0, "a:2 b:2")) == [StartWorker(2, "b", 0)]
    run.standby(5.0, 2)
    run.ready(6.0, 0, 1)
    assert run.plan.members == (0, 1, 2)
    assert run.at(7.0, lists(7.0, "a:3 b:2")) == []


def test_a_spare_waits_and_replaces_a_lost_worker_at_once() -> None:
    run = Scenario("a:3", num=2, most=2, spares=1).running(2)
    assert [each.worker for each in run.started] == [0, 1, 2]
    assert run.standby(5.0, 2) == [], "no room: it is not announced"
    run.exits(6.0, 0)
    plan = published(run.ready(6.1, 1))
    assert (plan.members, plan.source, plan.new) == ((1, 2), 1, (2,))
    assert run.at(8.0) == [StartWorker(3, "a", 0)], "the next spare"


def test_new_workers_of_an_old_host_get_ranks_next_to_it() -> None:
    run = Scenario("a:1 b:1", num=2).running(2)
    run.at(2.0, lists(2.0, "c:1 a:2 b:1"))
    run.standby(3.0, 2, 3)
    assert [(each.host, each.slot) for each in run.started[2:]] == [("a", 1), ("c", 0)]
    assert published(run.ready(4.0, 0, 1)).members == (0, 2, 1, 3), "a, a, b, c"


def test_a_loss_during_an_orderly_change_ends_the_generation() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.at(2.0, lists(2.0, "a:2 b:1"))
    run.standby(3.0, 2)
    run.ready(4.0, 0)
    assert of_type(run.exits(4.1, 1), EndGeneration)
    assert run.plan.members == (0, 2)


def test_a_member_that_does_not_leave_in_order_is_asked_to_leave_at_once_then_killed() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.at(2.0, lists(2.0, "a:2 b:1"))
    run.standby(3.0, 2)
    run.ready(4.0, 0)
    assert run.at(6.09) == []
    assert run.at(6.1) == [EndGeneration(0, "rank 1 on a has not left it in time")]
    assert run.at(8.19) == [] and run.at(8.21) == [KillWorker(1)]
    assert published(run.exits(8.5, 1)).members == (0, 2)


def test_a_slow_step_delays_the_change_and_nothing_else() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.at(2.0, lists(2.0, "a:2 b:1"))
    assert run.standby(3.0, 2) == [NotifyChange(0, "grow")]
    assert run.roster.deadline is None and run.at(4000.0) == []


# Horovod announces new workers before they are on standby.


def test_workers_are_announced_after_two_seconds_and_waited_for() -> None:
    run = Scenario("a:2", num=2, notify_after=2.0).running(2)
    run.at(3.0, lists(3.0, "a:2 b:2"))
    assert run.at(4.9) == [] and run.at(5.0) == [NotifyChange(0, "grow")]
    assert run.ready(5.5, 0, 1) == [], "else the same world would form again"
    assert run.standby(7.0, 3) == []
    assert published(run.standby(8.0, 2)).members == (0, 1, 2, 3)


def test_workers_that_were_announced_and_do_not_come_are_not_waited_for_forever() -> None:
    run = Scenario("a:2", num=2, notify_after=2.0, join_timeout=30.0).running(2)
    run.at(3.0, lists(3.0, "a:2 b:2"))
    run.at(5.0)
    run.ready(5.5, 0, 1)
    run.standby(6.0, 2)
    assert run.at(35.4) == []
    assert published(run.at(35.5)).members == (0, 1, 2)
    # It is announced again, because this world is another one.
    assert run.at(36.0) == []
    assert run.standby(40.0, 3) == []


def test_an_announced_worker_that_dies_is_not_waited_for() -> None:
    run = Scenario("a:2", num=2, notify_after=2.0, max_failures=1).running(2)
    run.at(3.0, lists(3.0, "a:2 b:1"))
    run.at(5.0)
    run.ready(5.5, 0, 1)
    assert published(run.exits(6.0, 2, 1)).members == (0, 1)


# Withdrawn hosts.


def test_workers_of_a_withdrawn_host_leave_at_a_step_boundary() -> None:
    run = Scenario().running()
    assert run.at(2.0, lists(2.0, "a:2")) == [NotifyChange(0, "shrink")]
    run.ready(3.0, 0, 1, 2)
    actions = run.ready(3.1, 3)
    assert of_type(actions, Dismiss) == [Dismiss(2), Dismiss(3)]
    assert published(actions).members == (0, 1)
    assert run.exits(4.0, 2, 1) == [], "its exit code is ignored"
    assert run.at(13.1) == [KillWorker(3)], "it has not exited"
    assert run.exits(13.2, 3) == []


def test_fewer_slots() -> None:
    run = Scenario("a:3", num=3).running(3)
    assert run.at(2.0, lists(2.0, "a:2")) == [NotifyChange(0, "shrink")]
    assert published(run.ready(3.0, 0, 1, 2)).members == (0, 1)


def test_a_worker_on_standby_of_a_withdrawn_host_is_dismissed_at_once() -> None:
    run = Scenario("a:1", num=1, most=3).running(1)
    run.at(2.0, lists(2.0, "a:1 b:2"))
    run.standby(3.0, 1)
    assert run.at(4.0, lists(4.0, "a:1")) == [Dismiss(1), Dismiss(2)]
    assert run.exits(5.0, 1, 1) == [] and run.exits(5.0, 2, 1) == []


def test_withdrawn_and_new_hosts_change_in_one_plan() -> None:
    """Some of Horovod's ranks skip the sync with new workers then, and wait forever."""
    run = Scenario("a:2 b:2", num=4, most=4).running()
    actions = run.at(2.0, lists(2.0, "a:2 c:2"))
    assert actions == [
        NotifyChange(0, "shrink"),
        StartWorker(4, "c", 0),
        StartWorker(5, "c", 1),
    ], "new workers start before the old ones have stopped"
    assert run.standby(3.0, 4, 5) == [NotifyChange(0, "mixed")]
    actions = run.ready(4.0, 0, 1, 2, 3)
    plan = published(actions)
    assert (plan.members, plan.new) == ((0, 1, 4, 5), (4, 5)), "`new`: all members synchronize"
    assert plan.reason == "2 workers join, 2 leave"


def test_fewer_than_the_minimum_left_after_a_withdrawal() -> None:
    """Horovod waits forever then (horovod #3494)."""
    run = Scenario(least=3, elastic_timeout=100.0).running()
    run.at(2.0, lists(2.0, "a:2"))
    assert run.ready(3.0, 0, 1, 2, 3) == []
    run.at(10.0, lists(10.0, "a:2 c:1"))
    actions = run.standby(12.0, 4)
    assert published(actions).members == (0, 1, 4)
    assert of_type(actions, Dismiss) == [Dismiss(2), Dismiss(3)]
    for worker in (2, 3):
        run.exits(13.0, worker, 1)
    run.at(20.0, lists(20.0, "a:2"))
    run.ready(21.0, 0, 1, 4)
    assert run.at(121.0) == [SaveAndExit(0, True), SaveAndExit(1, False), SaveAndExit(4, False)]
    for worker in (0, 1, 4):
        end = run.exits(122.0, worker, 75)
    assert finished(end)[0] == 75


def test_a_host_that_returns_before_the_plan_is_used() -> None:
    run = Scenario(least=3).running()
    run.at(2.0, lists(2.0, "a:2"))
    run.ready(3.0, 0, 1, 2, 3)
    assert published(run.at(4.0, lists(4.0, "a:2 b:2"))).members == (0, 1, 2, 3)


def test_a_host_that_returns_does_not_exceed_the_maximum() -> None:
    run = Scenario("a:1 b:1", num=2, most=2).running(2)
    run.at(2.0, lists(2.0, "a:1 c:1"))
    run.standby(3.0, 2)
    run.at(4.0, lists(4.0, "a:1 b:1 c:1"))
    assert published(run.ready(5.0, 0, 1)).members == (0, 1), "worker 2 stays on standby"
    run.exits(6.0, 1)
    assert published(run.ready(6.1, 0)).members == (0, 2)


def test_a_member_that_exits_with_its_withdrawn_host_is_no_failure() -> None:
    run = Scenario("a:1 b:1", num=2, max_failures=1).running(2)
    actions = run.at(2.0, lists(2.0, "a:1"), WorkerExited(2.0, 1, -15))
    assert of_type(actions, EndGeneration) == [EndGeneration(0, "rank 1 on b left with its host")]
    run.ready(2.1, 0)
    assert run.plan.members == (0,)
    assert finished(run.exits(3.0, 0, 0)) == (0, "")


def test_a_member_of_a_withdrawn_host_does_not_end_the_job_with_0() -> None:
    run = Scenario("a:1 b:1", num=2).running(2)
    run.at(2.0, lists(2.0, "a:1"))
    assert of_type(run.exits(2.5, 1, 0), EndGeneration)
    assert published(run.ready(2.6, 0)).members == (0,)


def test_all_members_leave_with_their_hosts() -> None:
    for codes, expected in [((0, 0), 0), ((75, 0), 75), ((0, -15), 1)]:
        run = Scenario("a:1 b:1", num=2).running(2)
        run.at(2.0, lists(2.0, ""))
        run.exits(2.5, 1, codes[0])
        code, text = finished(run.exits(2.6, 0, codes[1]))
        assert code == expected and ("no state left" in text) == (code != 0)


def test_all_hosts_replaced_the_source_stays_until_the_others_have_its_state() -> None:
    """Horovod ends such a job: unable to broadcast state."""
    run = Scenario("a:2", num=2).running(2)
    run.at(2.0, lists(2.0, "b:2"))
    run.standby(3.0, 2, 3)
    run.ready(4.0, 0, updates=3)
    actions = run.ready(4.0, 1, updates=3)
    assert of_type(actions, Dismiss) == [Dismiss(1)]
    plan = published(actions)
    assert (plan.members, plan.source) == ((0, 2, 3), 0)
    assert of_type(actions, NotifyChange) == [NotifyChange(1, "shrink")], "and leaves after that"
    actions = run.ready(5.0, 0, 2, 3, updates=4)
    assert of_type(actions, Dismiss) == [Dismiss(0)]
    assert (published(actions).members, run.plan.source) == ((2, 3), 2)


def test_all_hosts_withdrawn_the_workers_wait_then_save() -> None:
    run = Scenario("a:2", num=2, elastic_timeout=60.0).running(2)
    assert run.at(2.0, lists(2.0, "")) == [NotifyChange(0, "shrink")]
    assert run.ready(3.0, 0, 1) == []
    assert run.at(63.0) == [SaveAndExit(0, True), SaveAndExit(1, False)]


def test_a_withdrawn_host_that_is_listed_again_starts_without_failures() -> None:
    run = Scenario("a:1 b:1", num=1, max_failures=1).running(1)
    run.exits(2.0, 1, 1)
    assert run.roster.deadline is None
    run.at(3.0, lists(3.0, "a:1"))
    assert run.at(4.0, lists(4.0, "a:1 b:1")) == [StartWorker(2, "b", 0)]


def test_a_slot_is_used_again_only_when_its_old_process_has_ended() -> None:
    run = Scenario("a:1", num=1, most=3).running(1)
    run.at(2.0, lists(2.0, "a:1 b:1"))
    run.at(3.0, lists(3.0, "a:1"))
    assert run.at(4.0, lists(4.0, "a:1 b:1")) == []
    assert run.exits(5.0, 1, 1) == [StartWorker(2, "b", 0)]


def test_simultaneous_ready_and_exit() -> None:
    run = Scenario("a:2", num=2).running(2)
    actions = run.at(2.0, WorkerExited(2.0, 1, -9), Ready(2.0, 1, 0, 3), Ready(2.0, 0, 0, 3))
    assert published(actions).members == (0,)
