"""The first world, losses, and the plans that follow them."""

import pytest

from allstep.launch.roster.actions import (
    Dismiss,
    EndGeneration,
    ForwardSignal,
    KillWorker,
    Publish,
    SaveAndExit,
    StartWorker,
)
from allstep.launch.roster.roster_events import (
    HostLost,
    HostsFound,
    Progress,
    Ready,
    Standby,
    StartFailed,
    WorkerExited,
)
from support.roster_scenario import Scenario, finished, listed, of_type, published

# The first world.


def test_workers_start_in_all_slots_at_once_and_form_the_first_world() -> None:
    run = Scenario("a:2 b:2", num=3)
    assert run.started == [
        StartWorker(0, "a", 0),
        StartWorker(1, "a", 1),
        StartWorker(2, "b", 0),
        StartWorker(3, "b", 1),
    ]
    assert run.standby(1.0, 3, 0) == []
    plan = published(run.standby(1.5, 1))
    assert (plan.generation, plan.members, plan.source) == (0, (0, 1, 3), None)
    assert plan.new == plan.members


def test_no_more_workers_than_the_maximum() -> None:
    run = Scenario("a:3 b:3", num=2, most=4)
    assert [each.host for each in run.started] == ["a", "a", "a", "b"]


def test_too_few_hosts_end_the_run_after_the_timeout() -> None:
    run = Scenario("a:2", num=4, elastic_timeout=60.0)
    run.standby(1.0, 0, 1)
    assert run.at(59.9) == []
    assert run.at(60.0) == [ForwardSignal(15)]
    run.exits(60.1, 0, -15)
    code, text = finished(run.exits(60.2, 1, -15))
    assert code == 1
    assert "2 of 4 workers are on standby and the hosts have 2 usable slots" in text


def test_workers_that_have_started_get_more_time_than_hosts() -> None:
    run = Scenario("a:2", num=2, elastic_timeout=5.0)
    run.standby(1.0, 0)
    assert run.at(599.9) == [], "the other one may import for minutes"
    assert run.at(600.0) == [ForwardSignal(15)]


def test_slots_that_are_given_up_end_the_run_at_once() -> None:
    run = Scenario("a:1", num=1, max_failures=2)
    run.exits(1.0, 0, 3, errors=("Traceback (most recent call last):", "ImportError: x"))
    assert run.at(1.9) == [] and run.at(2.0) == [StartWorker(1, "a", 0)]
    code, text = finished(run.at(3.0, StartFailed(3.0, 1, "no route to host")))
    assert code == 3
    assert "worker 0 on a failed before it joined: exit code 3" in text
    assert "  ImportError: x" in text


def test_a_worker_that_is_slow_to_start_is_not_waited_for() -> None:
    run = Scenario("a:3", num=2, least=1)
    run.standby(1.0, 0, 1)
    assert run.plan.members == (0, 1)


# A loss.


def test_a_lost_worker_ends_the_generation_and_the_others_form_the_next() -> None:
    run = Scenario().running()
    assert run.exits(2.0, 1) == [EndGeneration(0, "lost rank 1 on a: killed by signal 9 (SIGKILL)")]
    assert run.ready(2.1, 0, 2) == []
    plan = published(run.ready(2.2, 3))
    assert plan.members == (0, 2, 3) and plan.generation == 1
    assert (plan.source, plan.updates, plan.new, plan.behind) == (0, 3, (), ())
    assert plan.reason == "lost rank 1 on a: killed by signal 9 (SIGKILL)"


def test_rank_0_may_be_lost() -> None:
    run = Scenario().running()
    run.exits(2.0, 0)
    plan = published(run.ready(2.1, 1, 2, 3))
    assert plan.members == (1, 2, 3) and plan.source == 1


def test_the_source_has_the_most_updates() -> None:
    run = Scenario().running()
    run.exits(2.0, 1)
    run.ready(2.1, 0, updates=3)
    plan = published(run.ready(2.1, 2, 3, updates=4))
    assert (plan.source, plan.updates, plan.behind) == (2, 4, (0,))
    assert plan.members[0] == 0, "the order of ranks does not depend on updates"


def test_the_dead_worker_is_replaced_after_a_second_and_joins_later() -> None:
    run = Scenario().running()
    run.exits(2.0, 1)
    run.ready(2.1, 0, 2, 3)
    assert run.at(2.99) == []
    assert run.roster.deadline == 3.0
    assert run.at(3.0) == [StartWorker(4, "a", 1)]


def test_a_worker_on_standby_joins_at_once_after_a_loss() -> None:
    run = Scenario("a:2 b:2", num=3, most=3).running(3)
    # There is room for another worker as soon as one has died.
    assert run.exits(2.0, 1)[1:] == [StartWorker(3, "b", 1)]
    run.standby(2.1, 3)
    plan = published(run.ready(2.2, 0, 2))
    assert plan.members == (0, 2, 3) and plan.new == (3,)


def test_a_member_that_leaves_unasked_ends_the_generation() -> None:
    run = Scenario().running()
    assert run.ready(2.0, 2) == [EndGeneration(0, "rank 2 on b has left it")]
    run.exits(2.1, 1)
    assert published(run.ready(2.2, 0, 3)).members == (0, 2, 3)


def test_a_lost_host_is_the_loss_of_all_its_workers() -> None:
    run = Scenario().running()
    assert run.at(2.0, HostLost(2.0, "a", "no sign of life for 10 s")) == [
        EndGeneration(0, "lost host a: no sign of life for 10 s")
    ]
    assert published(run.ready(2.1, 2, 3)).members == (2, 3)
    assert run.exits(2.2, 0) == [], "its agent has killed it before"
    assert run.at(3.0) == [StartWorker(4, "a", 0), StartWorker(5, "a", 1)]


# Fencing.


def test_a_member_that_does_not_answer_is_killed_and_waited_for() -> None:
    run = Scenario().running()
    run.exits(2.0, 1)
    run.ready(2.1, 0, 2)
    # Replacements do not matter here.
    run.at(3.0)
    assert run.at(4.09) == [] and run.at(4.1) == [KillWorker(3)]
    assert run.at(5.0) == [], "no plan before its end is known"
    assert run.ready(5.1, 3) == [], "it may still act until it has exited"
    assert published(run.exits(5.2, 3)).members == (0, 2)


def test_a_member_that_is_killed_while_it_ends_is_reported_with_its_error() -> None:
    """It has raised, and its exit takes too long; the others leave, and the grace time passes."""
    run = Scenario().running()
    run.ready(2.0, 0, 1, 2)
    run.at(3.9)
    assert KillWorker(3) in run.at(4.1)
    errors = ("Traceback (most recent call last):", "  boom()", "ValueError: boom")
    plan = published(run.exits(4.2, 3, errors=errors))
    assert plan.reason.endswith(
        ": killed by signal 9 (SIGKILL), because it had not ended in time after its error"
        " 'ValueError: boom'"
    )


def test_the_grace_time_has_the_length_of_the_last_step() -> None:
    run = Scenario("a:2", num=2).running(2, steps=0)
    run.progress(11.0, 1, 0, 1)
    run.progress(12.0, 2, 1)
    run.exits(13.0, 1)
    assert run.at(13.0 + 2.0 + 9.9) != [KillWorker(0)]
    assert run.at(13.0 + 2.0 + 10.0) == [KillWorker(0)]


def test_a_member_in_its_first_step_gets_more_time() -> None:
    run = Scenario("a:2", num=2, first_step=30.0, max_failures=1).running(2, steps=0)
    run.exits(2.0, 1)
    assert run.at(33.9) == [] and run.at(34.0) == [KillWorker(0)]


def test_a_killed_member_that_never_ends_ends_the_run_in_time() -> None:
    run = Scenario("a:3", num=3, elastic_timeout=20.0, grace=5.0, max_failures=1).running(3)
    run.exits(2.0, 1)
    run.ready(2.1, 0)
    assert run.at(4.1) == [KillWorker(2)]
    assert run.at(22.0) == [SaveAndExit(0, saves=True)]
    run.exits(23.0, 0, 75)
    assert run.at(27.0) == [], "it was killed before"
    code, text = finished(run.at(37.0))
    assert code == 75 and "rank 2 on a has not ended 20 s" in text


# Losses while the next world forms.


def test_a_ready_worker_that_dies_is_left_out() -> None:
    """Horovod's driver waits forever for it (horovod #3014)."""
    run = Scenario().running()
    run.exits(2.0, 1)
    run.ready(2.1, 0, 2)
    assert run.exits(2.2, 2) == [], "the generation has ended already"
    assert published(run.ready(2.3, 3)).members == (0, 3)


def test_a_worker_on_standby_dies_before_the_plan() -> None:
    run = Scenario("a:2 b:2", num=3, most=3).running(3)
    run.exits(2.0, 1)
    run.standby(2.1, 3)
    run.exits(2.2, 3)
    assert published(run.ready(2.3, 0, 2)).members == (0, 2)


def test_a_new_member_dies_right_after_the_plan() -> None:
    run = Scenario("a:2 b:2", num=3, most=3).running(3)
    run.exits(2.0, 1)
    run.standby(2.1, 3)
    run.ready(2.2, 0, 2)
    assert of_type(run.exits(2.3, 3), EndGeneration) == [
        EndGeneration(1, "lost rank 2 on b: killed by signal 9 (SIGKILL)")
    ]
    assert published(run.ready(2.4, 0, 2)).members == (0, 2)


def test_the_source_dies_during_the_broadcast() -> None:
    """A new worker without the state is neither source nor rank 0."""
    run = Scenario("a:1 b:1 c:1", num=2, most=2, max_failures=1).running(2)
    run.exits(2.0, 0)
    run.standby(2.1, 2)
    assert published(run.ready(2.2, 1)).members == (1, 2)
    run.exits(2.3, 1)
    assert run.ready(2.4, 2, updates=0) == [ForwardSignal(15)]
    code, text = finished(run.exits(2.5, 2, -15))
    assert code == 137 and "no state left" in text and "rank 0 on b failed first of 2" in text


def test_a_new_worker_without_state_follows_those_that_have_it() -> None:
    run = Scenario("a:1 b:2", num=2, most=3).running(3)
    run.exits(2.0, 0)
    run.ready(2.1, 1, 2)
    run.at(3.0)
    run.standby(3.5, 3)
    run.ready(3.6, 1, 2)
    assert run.plan.members == (1, 2, 3)
    run.exits(3.7, 1)
    run.ready(3.8, 3, updates=None)
    plan = published(run.ready(3.8, 2))
    assert (plan.members, plan.source, plan.new, plan.behind) == ((2, 3), 2, (), (3,))


def test_no_state_left() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.exits(2.0, 1, 1)
    code, text = finished(run.exits(2.1, 0, -9))
    assert code == 1
    assert "rank 1 on a failed first of 2: exit code 1" in text
    assert "no state left: all 2 workers of generation 0" in text
    # Horovod's text (contract 3.4).
    assert "unable to broadcast state" in text


def test_nothing_starts_once_the_run_stops() -> None:
    run = Scenario("a:1 b:1", num=1, most=1).running(1)
    assert finished(run.exits(2.0, 0, 1))[0] == 1
    assert run.started == [StartWorker(0, "a", 0)]


# Too few.


def test_below_the_minimum_the_others_wait_for_replacements() -> None:
    run = Scenario("a:2", num=2, least=2).running(2)
    run.exits(2.0, 1)
    assert run.ready(2.1, 0) == []
    assert run.at(3.0) == [StartWorker(2, "a", 1)]
    plan = published(run.standby(9.0, 2))
    assert (plan.members, plan.source, plan.new) == ((0, 2), 0, (2,))


def test_below_the_minimum_for_too_long_one_worker_saves() -> None:
    run = Scenario("a:3", num=3, least=3, max_failures=1, elastic_timeout=50.0).running(3)
    run.exits(2.0, 1)
    run.ready(2.1, 0, updates=3)
    run.ready(2.1, 2, updates=4)
    assert run.at(51.9) == []
    assert run.at(52.0) == [SaveAndExit(0, saves=False), SaveAndExit(2, saves=True)]
    run.exits(53.0, 0, 75)
    code, text = finished(run.exits(54.0, 2, 75))
    assert code == 75 and "2 workers can continue, the minimum is 3" in text


def test_workers_that_cannot_save_are_killed_and_the_run_fails() -> None:
    run = Scenario("a:2", num=2, least=2, max_failures=1, elastic_timeout=50.0).running(2)
    run.exits(2.0, 1)
    run.ready(2.1, 0)
    run.at(52.0)
    assert run.at(81.9) == [] and run.at(82.0) == [KillWorker(0)]
    assert finished(run.at(92.0))[0] == 1


# Slots.


def test_a_slot_is_given_up_after_three_failures_without_a_step() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.exits(2.0, 1)
    run.ready(2.1, 0)
    for number, (free, dies) in enumerate([(3.0, 3.5), (5.5, 6.0)], start=2):
        assert run.at(free - 0.01) == []
        assert run.at(free) == [StartWorker(number, "a", 1)]
        run.exits(dies, number, 1)
    assert run.roster.deadline is None and run.at(1000.0) == []


def test_a_finished_step_clears_the_failures_of_a_slot() -> None:
    run = Scenario("a:2", num=2, max_failures=2).running(2)
    now, replacement = 2.0, 1
    for _ in range(4):
        run.exits(now, replacement)
        run.ready(now + 0.1, 0)
        (start,) = run.at(now + 1.0)
        assert isinstance(start, StartWorker)
        replacement = start.worker
        run.standby(now + 2.0, replacement)
        run.ready(now + 2.1, 0)
        run.progress(now + 2.5, 4, 0, replacement)
        now += 3.0
    assert run.plan.generation == 8


# Events out of place.


def test_events_of_the_past_change_nothing() -> None:
    run = Scenario().running()
    run.exits(2.0, 1)
    run.ready(2.1, 0, 2, 3)
    stale = [
        Ready(2.2, 0, 0, 3),
        Progress(2.2, 2, 0, 9),
        Standby(2.2, 3),
        Standby(2.2, 77),
        WorkerExited(2.2, 1, 0),
        StartFailed(2.2, 0, "late"),
        HostLost(2.2, "unknown", "x"),
    ]
    assert run.at(2.2, *stale) == []
    assert run.plan.members == (0, 2, 3)


@pytest.mark.parametrize("second", ["same", "other"])
def test_a_list_that_changes_nothing_starts_nothing(second: str) -> None:
    run = Scenario().running()
    hosts = "a:2 b:2" if second == "same" else "b:2 a:2"
    assert run.at(5.0, HostsFound(5.0, listed(hosts))) == []


def test_nothing_happens_after_the_end() -> None:
    run = Scenario("a:1", num=1).running(1)
    assert finished(run.exits(2.0, 0, 0)) == (0, "")
    assert run.roster.is_over and run.roster.deadline is None
    assert run.at(3.0, HostsFound(3.0, listed("a:4"))) == []
    assert not of_type(run.at(4.0), Publish, Dismiss)
