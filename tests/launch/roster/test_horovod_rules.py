"""The rules of Horovod's driver: blacklisted hosts, cool-down, reset limit."""

from allstep.launch.roster.actions import (
    EndGeneration,
    ForwardSignal,
    KillWorker,
    NotifyChange,
    StartWorker,
)
from allstep.launch.roster.roster_events import HostLost, HostsFound, StartFailed
from support.roster_scenario import Scenario, finished, listed, of_type, published


def test_a_failing_worker_excludes_its_host() -> None:
    run = Scenario(blacklist=True).running()
    assert run.exits(2.0, 2, 1) == [
        EndGeneration(0, "lost rank 2 on b: exit code 1"),
        KillWorker(3),
    ]
    run.ready(2.1, 0, 1)
    assert published(run.exits(2.2, 3)).members == (0, 1)
    assert run.at(5000.0, HostsFound(5000.0, listed("a:2 b:2"))) == [], "permanently"


def test_a_ready_worker_of_an_excluded_host_is_killed_too() -> None:
    run = Scenario(blacklist=True).running()
    run.ready(1.9, 3)
    run.ready(1.9, 0, 1)
    run.exits(2.0, 2, 1)
    assert published(run.exits(2.2, 3)).members == (0, 1)


def test_the_end_of_a_single_host_names_the_rule() -> None:
    run = Scenario("a:2", num=2, blacklist=True).running(2)
    assert KillWorker(1) in run.exits(2.0, 0, 3)
    code, text = finished(run.exits(2.1, 1))
    assert code == 3, "that of the worker that failed by itself"
    assert "a failing worker excludes its whole host, and a is the only one" in text
    assert "`allstep run --min-np`" in text


def test_the_rule_is_not_named_where_it_is_not_the_reason() -> None:
    run = Scenario("a:1 b:1", num=2, blacklist=True).running(2)
    run.exits(2.0, 0, 3)
    assert "--min-np" not in finished(run.exits(2.1, 1, 3))[1]


def test_all_hosts_excluded_before_the_start() -> None:
    run = Scenario("a:1 b:1", num=2, blacklist=True)
    assert run.exits(1.0, 0, 1) == [ForwardSignal(15)], "one slot is not enough"
    code, text = finished(run.exits(1.5, 1, -15))
    assert code == 1 and "0 of 2 workers are on standby and the hosts have 1 usable" in text


def test_a_killed_worker_on_standby_does_not_join() -> None:
    run = Scenario("a:2 b:2", num=2, blacklist=True)
    run.standby(1.0, 1)
    assert run.exits(1.1, 0, 1) == [KillWorker(1)]
    assert run.standby(1.2, 2) == [], "the kill may take a while"
    assert published(run.standby(1.3, 3)).members == (2, 3)


def test_a_host_that_is_lost_or_cannot_start_is_excluded() -> None:
    run = Scenario(blacklist=True).running()
    run.at(2.0, HostLost(2.0, "b", "no sign of life"))
    run.ready(2.1, 0, 1)
    assert run.at(100.0) == []
    run.at(101.0, HostsFound(101.0, listed("a:2 b:2 c:1")))
    assert run.started[-1] == StartWorker(4, "c", 0)
    run.at(102.0, StartFailed(102.0, 4, "no ssh"))
    assert run.at(1000.0) == []


def test_a_host_returns_after_its_cool_down() -> None:
    run = Scenario(blacklist=True, cooldown_range=(1.0, 100.0)).running()
    run.exits(2.0, 2, 1)
    run.ready(2.1, 0, 1)
    run.exits(2.2, 3)
    until = run.roster.deadline
    assert until is not None and 2.0 + 2.0 <= until <= 2.0 + 3.0, "lo * 2 + U(0, 1) * lo"
    assert run.at(until - 0.01) == []
    assert run.at(until) == [StartWorker(4, "b", 0), StartWorker(5, "b", 1)]
    assert run.standby(until + 1.0, 4) == [NotifyChange(1, "grow")]


def test_the_reset_limit() -> None:
    run = Scenario(reset_limit=1).running()
    run.exits(2.0, 1)
    run.ready(2.1, 0, 2, 3)
    assert run.plan.generation == 1
    run.exits(3.0, 2)
    assert of_type(run.ready(3.1, 0, 3), ForwardSignal)
    for worker in (0, 3, 4):
        end = run.exits(3.2, worker, -15)
    code, text = finished(end)
    assert code == 1 and "number of resets during elastic job exceeded limit" in text


def test_no_reset_allowed() -> None:
    run = Scenario("a:2", num=2, reset_limit=0).running(2)
    run.exits(2.0, 1)
    run.ready(2.1, 0)
    assert "exceeded limit (0)" in finished(run.exits(2.2, 0, -15))[1]
