"""How a run ends: done, errors of the program, signals."""

import signal

import pytest

from allstep.launch.roster.actions import (
    Dismiss,
    EndGeneration,
    ForwardSignal,
    KillWorker,
    NotifyChange,
    SaveAndExit,
)
from allstep.launch.roster.elastic_state import Stage
from allstep.launch.roster.roster_events import HostLost, HostsFound, HostsSignaled
from support.roster_scenario import Scenario, finished, listed, of_type, published

OWN = ("Traceback (most recent call last):", "  x", "ValueError: no")
BLAMES = ("Traceback (most recent call last):", "  x", "RuntimeError: Connection closed by peer")


# Done.


def test_members_that_exit_with_0_end_the_job() -> None:
    run = Scenario("a:3", num=2, most=3).running(2)
    run.standby(2.0, 2)
    assert run.exits(2.1, 0, 0) == [Dismiss(2)], "no plan follows for a worker on standby"
    assert run.exits(2.2, 2, 1) == []
    assert run.at(3.0, HostsFound(3.0, listed("a:3 b:2"))) == [], "no new worker"
    assert run.roster.deadline is None, "others run to their ends"
    assert finished(run.exits(500.0, 1, 0)) == (0, "")


def test_a_worker_of_the_last_generation_that_fails_fails_the_job() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.exits(2.0, 0, 0)
    code, text = finished(run.exits(2.1, 1, 7, errors=OWN))
    assert code == 7 and "rank 1 on a failed first of 2: exit code 7" in text


def test_a_failure_from_which_the_run_recovered_does_not_count() -> None:
    run = Scenario("a:2", num=2, max_failures=1).running(2)
    run.exits(2.0, 1, 7)
    run.ready(2.1, 0)
    assert finished(run.exits(3.0, 0, 0)) == (0, "")


def test_a_loss_while_the_job_finishes_frees_the_others_and_has_a_limit() -> None:
    run = Scenario("a:3", num=3, elastic_timeout=60.0).running(3)
    run.exits(2.0, 0, 0)
    assert of_type(run.exits(2.1, 1, 7), EndGeneration)
    assert run.roster.deadline == 62.1
    assert run.at(62.1) == [ForwardSignal(signal.SIGTERM)]
    assert run.at(65.1) == [KillWorker(2)]
    assert finished(run.exits(65.2, 2))[0] == 7


def test_a_member_that_gets_ready_while_the_job_finishes_is_dismissed() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.exits(2.0, 0, 0)
    assert run.ready(2.1, 1) == [Dismiss(1)]
    assert finished(run.exits(2.2, 1, 1)) == (0, "")


def test_a_done_member_ends_the_recovery_of_others() -> None:
    run = Scenario("a:3", num=3).running(3)
    run.exits(2.0, 1, 1)
    run.ready(2.1, 0)
    assert run.exits(2.2, 2, 0) == [Dismiss(0)]
    assert finished(run.exits(2.3, 0, 0))[0] == 1, "a worker of the last world has failed"


def test_a_command_that_joins_no_world() -> None:
    run = Scenario("a:2", num=2)
    assert run.exits(1.0, 0, 0) == []
    assert finished(run.exits(1.5, 1, 0)) == (0, "")
    run = Scenario("a:2", num=2)
    run.exits(1.0, 0, 0)
    assert finished(run.exits(1.5, 1, 4))[0] == 4


def test_workers_that_have_saved_stop_the_run() -> None:
    run = Scenario("a:3", num=2, most=3).running(2)
    run.standby(2.0, 2)
    assert run.exits(2.5, 0, 75) == [Dismiss(2)]
    run.exits(2.6, 2, 1)
    assert finished(run.exits(3.0, 1, 75)) == (75, "")


def test_after_75_the_others_have_the_grace_time() -> None:
    run = Scenario("a:2", num=2, grace=5.0).running(2)
    run.exits(2.0, 0, 75)
    assert run.at(6.9) == [] and run.at(7.0) == [KillWorker(1)]
    assert finished(run.exits(7.1, 1))[0] == 75


# Errors of the program.


def test_exit_code_2_ends_the_run_with_its_report() -> None:
    run = Scenario("a:2", num=2).running(2)
    assert of_type(run.exits(2.0, 1, 2, errors=("allstep: no such model",)), EndGeneration)
    run.ready(2.1, 0)
    assert run.at(2.24) == []
    assert run.at(2.25) == [ForwardSignal(signal.SIGTERM)]
    code, text = finished(run.exits(2.3, 0, -15))
    assert code == 2 and "rank 1 on a failed first of 2: exit code 2" in text
    assert "  allstep: no such model" in text


def test_a_silent_exit_code_2_waits_for_the_rank_that_explains_it() -> None:
    run = Scenario("a:3", num=3).running(3)
    run.exits(2.0, 1, 2)
    assert run.at(2.3) == []
    assert run.exits(3.0, 0, 2, errors=OWN) == [ForwardSignal(signal.SIGTERM)]
    run.exits(3.1, 2, -15)
    assert run.roster.is_over


def test_bad_input_before_the_first_world_ends_the_run() -> None:
    run = Scenario("a:2", num=2)
    run.exits(1.0, 0, 2, errors=("usage: train.py",))
    assert run.at(1.25) == [ForwardSignal(signal.SIGTERM)]
    code, text = finished(run.exits(1.3, 1, -15))
    assert code == 2 and "worker 0 on a failed before it joined: exit code 2" in text


def test_bad_input_of_a_joining_worker_does_not() -> None:
    run = Scenario("a:1", num=1).running(1)
    run.at(2.0, HostsFound(2.0, listed("a:1 b:1")))
    assert run.exits(3.0, 1, 2) == []
    assert run.roster.stage is Stage.RUNNING


def test_the_same_error_on_all_ranks_is_reported_as_such() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.exits(2.0, 1, 1, errors=OWN, signature="S")
    code, text = finished(run.exits(2.1, 0, 1, errors=OWN, signature="S"))
    assert code == 1 and "no state left" not in text
    assert text.count("ValueError: no") == 1


def test_different_errors_on_all_ranks_leave_no_state() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.exits(2.0, 1, 1, errors=OWN, signature="S")
    assert "no state left" in finished(run.exits(2.1, 0, 1, errors=OWN, signature="T"))[1]


def repeated(updates: int, errors: tuple[str, ...] = OWN, signature: str = "S") -> Scenario:
    """The same traceback in two generations, at 3 and at so many updates."""
    run = Scenario("a:3", num=3, max_failures=1).running(3)
    run.exits(2.0, 1, 1, errors=errors, signature=signature)
    run.ready(2.1, 0, 2)
    if updates > 3:
        run.progress(2.2, updates, 0, 2)
    run.exits(2.5, 2, 1, errors=errors, signature=signature)
    run.ready(2.6, 0, updates=updates)
    run.at(10.0)
    return run


def test_the_same_traceback_at_the_same_position_twice_ends_the_run() -> None:
    run = repeated(3)
    assert run.roster.stage is Stage.STOPPING
    code, text = finished(run.exits(10.1, 0, -15))
    assert code == 1 and "rank 1 on a failed first of 2: exit code 1" in text


@pytest.mark.parametrize(
    ("updates", "more"), [(4, {}), (3, {"errors": BLAMES}), (3, {"signature": ""})]
)
def test_another_position_or_a_consequence_or_no_traceback_does_not(
    updates: int, more: dict
) -> None:
    run = repeated(updates, **more)
    assert run.plan.generation == 2 and run.roster.stage is Stage.RUNNING


def test_the_same_traceback_on_two_ranks_of_one_generation_does_not() -> None:
    run = Scenario("a:3", num=3, max_failures=1).running(3)
    run.exits(2.0, 1, 1, errors=OWN, signature="S")
    run.exits(2.0, 2, 1, errors=OWN, signature="S")
    assert published(run.ready(2.1, 0)).members == (0,)


def test_out_of_memory_is_reported_as_such() -> None:
    run = Scenario("a:2", num=2).running(2)
    (end,) = run.exits(2.0, 1, -9, out_of_memory=True)
    assert "out-of-memory killer" in end.reason


# Signals.


def test_a_signal_is_forwarded_once_and_its_exits_are_no_failures() -> None:
    run = Scenario("a:3", num=2, most=3, grace=30.0).running(2)
    run.standby(2.0, 2)
    twice = [HostsSignaled(3.0, signal.SIGTERM), HostsSignaled(3.0, signal.SIGTERM)]
    assert run.at(3.0, *twice) == [ForwardSignal(signal.SIGTERM), Dismiss(2)]
    assert run.exits(4.0, 0, 1) == [] and run.exits(4.0, 2, 1) == []
    assert run.at(32.9) == [] and run.at(33.0) == [KillWorker(1)]
    assert finished(run.exits(33.1, 1)) == (128 + signal.SIGTERM, "")


def test_a_signal_to_workers_that_save_ends_with_75() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.at(3.0, HostsSignaled(3.0, signal.SIGUSR1))
    run.exits(4.0, 0, 75)
    assert finished(run.exits(4.1, 1, 0)) == (75, "")


def test_a_signal_to_workers_that_end_in_order() -> None:
    run = Scenario("a:2", num=2).running(2)
    run.at(3.0, HostsSignaled(3.0, signal.SIGUSR1))
    run.exits(4.0, 0, 0)
    assert finished(run.exits(4.1, 1, 0)) == (0, "")


def test_ctrl_c_kills_after_three_seconds_and_a_second_one_at_once() -> None:
    run = Scenario("a:1", num=1).running(1)
    run.at(3.0, HostsSignaled(3.0, signal.SIGINT))
    assert run.at(5.9) == [] and run.at(6.0) == [KillWorker(0)]
    run = Scenario("a:1", num=1).running(1)
    run.at(3.0, HostsSignaled(3.0, signal.SIGINT))
    assert run.at(3.5, HostsSignaled(3.5, signal.SIGINT)) == [KillWorker(0)]
    assert run.at(13.4) == []
    assert finished(run.at(13.5)) == (128 + signal.SIGINT, ""), "its end is not waited for longer"


def test_a_signal_before_any_worker() -> None:
    run = Scenario("", num=2)
    actions = run.at(1.0, HostsSignaled(1.0, signal.SIGINT))
    assert finished(actions) == (128 + signal.SIGINT, "")


def test_a_signal_while_the_next_world_forms_saves_the_state() -> None:
    run = Scenario("a:2", num=2, least=2, max_failures=1).running(2)
    run.exits(2.0, 1)
    run.ready(2.1, 0)
    assert run.at(3.0, HostsSignaled(3.0, signal.SIGTERM)) == [
        ForwardSignal(signal.SIGTERM),
        SaveAndExit(0, saves=True),
    ]
    assert finished(run.exits(4.0, 0, 75)) == (75, "")


def test_the_last_member_saves_if_no_other_has() -> None:
    run = Scenario("a:3", num=3).running(3)
    run.at(2.0, HostsSignaled(2.0, signal.SIGTERM))
    run.exits(2.5, 0, -9)
    assert run.ready(2.6, 1) == [SaveAndExit(1, saves=False)], "another member may save"
    assert run.ready(2.7, 2) == [SaveAndExit(2, saves=True)]


def test_a_signal_to_some_hosts_withdraws_them() -> None:
    run = Scenario().running()
    actions = run.at(2.0, HostsSignaled(2.0, signal.SIGUSR1, ("b",)))
    assert actions == [NotifyChange(0, "shrink")]
    run.ready(3.0, 0, 1, 2)
    assert of_type(run.exits(3.0, 3, 75), EndGeneration), "it has saved and left: no failure"
    assert run.plan.members == (0, 1)
    run.exits(4.0, 2, 0)
    assert run.at(50.0, HostsFound(50.0, listed("a:2 b:2"))) == [], "the host stays away"
    run.at(52.0, HostsFound(52.0, listed("a:2")))
    run.at(53.0, HostsFound(53.0, listed("a:2 b:2")))
    assert [each.host for each in run.started[4:]] == ["b", "b"]


def test_signals_that_reach_all_hosts_one_by_one_stop_the_run() -> None:
    run = Scenario().running()
    run.at(2.0, HostsSignaled(2.0, signal.SIGUSR1, ("b",)))
    actions = run.at(2.3, HostsSignaled(2.3, signal.SIGUSR1, ("a",)))
    assert actions == [ForwardSignal(signal.SIGUSR1)]
    for worker in range(4):
        end = run.exits(4.0, worker, 75)
    assert finished(end) == (75, "")


def test_a_host_that_is_lost_after_a_signal_is_not_waited_for() -> None:
    run = Scenario().running()
    run.at(2.0, HostsSignaled(2.0, signal.SIGTERM))
    run.exits(3.0, 0, 0)
    run.exits(3.0, 1, 0)
    assert finished(run.at(4.0, HostLost(4.0, "b", "cut"))) == (128 + signal.SIGTERM, "")
