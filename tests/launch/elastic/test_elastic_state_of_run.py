"""When an elastic run leaves a host out whose link has ended: only when its workers cannot act."""

from allstep.launch.elastic.elastic_run import ElasticRun
from allstep.launch.roster.actions import EndGeneration
from allstep.launch.roster.elastic_policy import Policy
from allstep.launch.roster.roster_events import Standby
from allstep.launch.run_events import Greeted, LeaveHost, LinkEnded
from allstep.launch.run_state import HostRanks

LOST = 10.0


def running() -> ElasticRun:
    """Return a run on hosts a (here) and b (another host), with a world of one worker each."""
    run = ElasticRun([HostRanks("a", [], False), HostRanks("b", [], True)], Policy(2, 1), LOST)
    for host in range(2):
        run.take(Greeted(0.0, host))
    run.start()
    run.offer([("a", 1), ("b", 1)], 0.0)
    run.decide(0.0)
    for worker in range(2):
        run.report(Standby(0.5, worker))
    run.decide(0.5)
    return run


def tick(run: ElasticRun, until: float) -> list[object]:
    """Decide twice a second, as the launcher's loop does; return what was decided last."""
    decided: list[object] = []
    now = run._decided_at
    while now < until - 1e-9:
        now = min(now + 0.5, until)
        decided = run.decide(now)
    return decided


def test_a_host_whose_agent_and_workers_ended_is_lost_at_once() -> None:
    run = running()
    run.take(LinkEnded(1.0, 1, "its agent was killed"))
    reason = "lost host b: its agent was killed"
    assert run.decide(1.0) == [
        LeaveHost(1, lost=True, why="its agent was killed"),
        EndGeneration(0, reason),
    ]


def test_workers_that_are_still_connected_keep_their_host() -> None:
    """Only ssh has ended: the agent kills them when it notices."""
    run, connected = running(), True
    run.may_act = lambda label: label == "b" and connected
    run.note_alive(1, 1.0)
    run.take(LinkEnded(1.0, 1, "the connection to it ended"))
    assert tick(run, 3.0) == [] and run.has_deadline
    connected = False
    assert tick(run, 3.5)[0] == LeaveHost(1, lost=True, why="the connection to it ended")


def test_a_cut_link_counts_as_silence() -> None:
    run = running()
    run.may_act = lambda label: label == "b"
    run.note_alive(1, 1.0)
    run.take(LinkEnded(1.5, 1, "the connection to it ended"))
    assert tick(run, 1.0 + LOST) == []
    assert tick(run, 1.5 + LOST)[0] == LeaveHost(1, lost=True, why="the connection to it ended")
