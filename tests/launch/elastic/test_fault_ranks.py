"""The ranks by which faults know the workers: each has one living worker at a time."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from allstep import wire
from allstep.errors import ConfigError
from allstep.faults import WorkerFaults
from allstep.faults.reports import Occurred
from allstep.launch import ElasticLauncher, Policy, launch
from allstep.launch.elastic.fault_ranks import FaultRanks
from allstep.launch.elastic.worker_table import WorkerTable
from allstep.wire import keys


@pytest.fixture
def store() -> Iterator[wire.Server]:
    with wire.Server(wire.new_token(), "127.0.0.1") as server:
        yield server


def test_a_replacement_takes_the_lowest_free_rank(store: wire.Server) -> None:
    workers = WorkerTable()
    ranks = FaultRanks(workers)

    def place(number: int, now: float) -> WorkerFaults | None:
        reply = ranks.at_first_place(number, store, now)
        return None if reply is None else WorkerFaults.of_reply(reply)

    for number in range(5):
        workers.add(number, "a", number)
    first = [place(number, 10.0) for number in range(3)]
    assert first == [WorkerFaults(rank) for rank in range(3)]
    assert place(1, 11.0) is None, "it keeps its rank"
    store.set(keys.fault_record(1), Occurred("kill@rank=0,step=3", 0, "text").to_json())
    workers.end(0)
    workers.end(1)
    # The survivor is rank 0 now and keeps its faults: those of rank 2.
    occurred = frozenset(["kill@rank=0,step=3"])
    assert place(3, 12.5) == WorkerFaults(0, occurred, 2.5)
    assert place(4, 13.0) == WorkerFaults(1, occurred, 3.0)
    workers.add(5, "a", 1)
    assert place(5, 20.0) == WorkerFaults(3, occurred, 10.0)
    assert ranks.of([2, 3, 99]) == {0, 2}


def test_the_launcher_refuses_a_rank_that_no_world_can_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A spare worker is in no world before it replaces another one."""
    monkeypatch.setattr(ElasticLauncher, "run", lambda launcher: 0)
    policy = Policy(1, 1, 3, spares=1)
    for rank, is_possible in ((2, True), (3, False)):
        env = {"ALLSTEP_FAULTS": f"kill@rank={rank}"}
        with nullcontext() if is_possible else pytest.raises(ConfigError, match="no rank 3 among"):
            assert launch(["true"], 1, env=env, policy=policy) == 0
