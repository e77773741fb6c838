"""A run that continues without lost workers, and replaces none."""

import pytest

from allstep.launch.roster import Policy
from allstep.launch.roster.actions import (
    EndGeneration,
    ForwardSignal,
    KillWorker,
    NotifyChange,
    ReportLoss,
    StartWorker,
)
from allstep.launch.roster.elastic_state import Stage
from allstep.launch.roster.roster_events import HostLost, HostsFound, Progress, StartFailed
from support.roster_scenario import Scenario, finished, listed, of_type, published

BAD_INPUT = "lost rank 1 on a: exit code 2"
LOST = "lost rank 1 on a: killed by signal 9 (SIGKILL)"


def scenario(hosts: str = "a:2 b:2", num: int = 4, **more) -> Scenario:
    return Scenario(hosts, num=num, most=num, replaces=False, **more)


def test_the_policy_needs_one_worker_and_has_no_spares() -> None:
    assert Policy.continuing(4) == Policy(4, 1, 4, replaces=False)


def test_a_loss_is_reported_and_the_others_are_only_asked_to_leave() -> None:
    run = scenario().running()
    left = "2.0 s after the start; 3 workers continue without it"
    assert run.exits(2.0, 1) == [ReportLoss(f"{LOST}; {left}"), NotifyChange(0, "shrink")]
    # No worker is killed or started, however long the others work on.
    assert run.roster.deadline is None and run.at(5000.0) == []
    assert run.roster.stage is Stage.RUNNING


def test_the_first_member_that_leaves_starts_the_grace_time_of_the_others() -> None:
    run = scenario().running()
    run.exits(2.0, 1)
    assert run.ready(100.0, 0, 2) == []
    assert run.roster.stage is Stage.CHANGING
    plan = published(run.ready(101.0, 3))
    assert plan.members == (0, 2, 3) and plan.reason == LOST
    # The next loss is one of this generation.
    run.progress(102.0, 9, 0, 2, 3)
    assert run.exits(103.0, 2)[1:] == [NotifyChange(1, "shrink")]


def test_a_member_that_does_not_follow_is_killed() -> None:
    run = scenario().running()
    run.exits(2.0, 1)
    run.ready(100.0, 0, 2)
    (end,) = run.at(102.1)
    assert end == EndGeneration(0, "rank 3 on b has not left it in time")
    assert run.at(104.2) == [KillWorker(3)]
    assert published(run.exits(104.3, 3)).members == (0, 2)


def test_a_survivor_may_leave_before_the_exit_is_known() -> None:
    run = scenario().running()
    assert run.ready(2.0, 0) == [EndGeneration(0, "rank 0 on a has left it")]
    assert of_type(run.exits(2.1, 1), NotifyChange, EndGeneration) == []
    plan = published(run.ready(2.2, 2, 3))
    assert plan.members == (0, 2, 3) and plan.reason == LOST


def test_a_generation_in_which_a_member_has_no_step_yet_is_ended_at_once() -> None:
    """It may wait for the lost worker while groups are formed, which no other notice ends."""
    run = scenario().running(steps=0)
    run.at(1.5, *(Progress(1.5, worker, 0, 1) for worker in (0, 2)))
    assert run.exits(2.0, 1)[1:] == [EndGeneration(0, LOST)]
    assert run.roster.stage is Stage.RUNNING, "a script that does not leave it is not killed"
    assert run.at(5000.0, HostsFound(5000.0, listed("a:2 b:1"))) == [], "it is to be left anyway"
    run.at(5000.5, HostsFound(5000.5, listed("a:2 b:2")))
    run.ready(5001.0, 0, 2)
    assert run.roster.stage is Stage.ENDED
    assert published(run.ready(5002.0, 3)).members == (0, 2, 3)


def test_a_script_that_never_leaves_succeeds_without_the_lost_rank() -> None:
    run = scenario("a:3", num=3).running(3)
    run.exits(2.0, 1)
    assert run.exits(9.0, 2, 0) == []
    assert finished(run.exits(10.0, 0, 0)) == (0, "")


@pytest.mark.parametrize("lost", [0, 2])
def test_the_lowest_rank_that_lives_decides(lost: int) -> None:
    """Another rank may be lost after the first one was done, not that with the duties."""
    run = scenario("a:3", num=3).running(3)
    run.exits(9.0, 1, 0)
    assert of_type(run.exits(9.5, lost), EndGeneration) == []
    code, text = finished(run.exits(10.0, 2 - lost, 0))
    if lost == 0:
        assert code == 137 and "rank 0 on a failed" in text
    else:
        assert (code, text) == (0, "")


def test_a_lost_rank_0_leaves_its_duties_to_the_next() -> None:
    run = scenario("a:3", num=3).running(3)
    run.exits(2.0, 0)
    run.exits(9.0, 1, 0)
    assert finished(run.exits(9.1, 2)) == (0, "")


def test_without_any_worker_the_run_has_failed() -> None:
    run = scenario("a:2", num=2).running(2)
    run.exits(2.0, 1)
    actions = run.exits(3.0, 0)
    assert of_type(actions, StartWorker, ReportLoss) == []
    code, text = finished(actions)
    assert code == 137 and "rank 1 on a failed first" in text


def test_the_last_worker_may_fail_in_a_generation_that_was_ended() -> None:
    """As a script without `rejoin` does at its next collective."""
    run = scenario("a:2", num=2).running(2, steps=0)
    assert of_type(run.exits(2.0, 1), EndGeneration)
    code, text = finished(run.exits(3.0, 0, 1))
    assert code == 137 and "rank 1 on a failed first" in text


def test_a_lost_host_is_one_loss() -> None:
    run = scenario().running()
    report, notice = run.at(9.0, HostLost(9.0, "a", "no sign of life for 10 s"))
    assert report == ReportLoss(
        "lost host a: no sign of life for 10 s; 9.0 s after the start; 2 workers continue without"
        " it"
    )
    assert notice == NotifyChange(0, "shrink")
    assert published(run.ready(10.0, 2, 3)).members == (2, 3)


def test_bad_input_ends_the_run() -> None:
    run = scenario("a:2", num=2).running(2)
    assert run.exits(2.0, 1, 2, errors=("usage: train.py",)) == [EndGeneration(0, BAD_INPUT)]
    assert ForwardSignal(15) in run.at(2.25)
    assert finished(run.exits(2.3, 0, -15))[0] == 2


# Before the first world.


def test_the_workers_that_are_left_form_the_first_world() -> None:
    run = scenario("a:3", num=3)
    run.standby(1.0, 0)
    report, *more = run.exits(2.0, 1, 3)
    assert more == [] and report == ReportLoss(
        "worker 1 on a failed before it joined: exit code 3; 2.0 s after the start; 2 workers"
        " continue without it"
    )
    assert run.at(60.0) == [], "no replacement; worker 2 still starts"
    assert published(run.standby(61.0, 2)).members == (0, 2)


def test_the_last_failure_at_the_start_ends_the_run() -> None:
    run = scenario("a:2", num=2)
    run.at(1.0, StartFailed(1.0, 0, "no such file"))
    code, text = finished(run.exits(2.0, 1, 3))
    assert code == 1 and "worker 0 on a failed before it joined: no such file" in text


def test_a_command_that_joins_no_world_fails_as_in_a_fixed_one() -> None:
    run = scenario("a:2", num=2)
    run.exits(1.0, 0, 3)
    code, text = finished(run.exits(2.0, 1, 0))
    assert code == 3 and "worker 0 on a failed" in text
    run = scenario("a:2", num=2)
    run.exits(1.0, 0, 0)
    assert finished(run.exits(2.0, 1, 0)) == (0, "")
