"""Which faults a worker of an elastic run has, when it joins its first world."""

import json
import os
from itertools import islice

import pytest

from allstep import faults
from allstep.errors import ConfigError
from allstep.faults import WorkerFaults
from allstep.faults.elastic import FAULT_RANK
from allstep.faults.random_sequence import sequence
from allstep.faults.schedule import Schedule
from allstep.faults.spec import RandomFaults, parse
from allstep.wire.keys import TICKET
from allstep.world import World

RANDOM = "random:kill@every=2,seed=5"
TEXT = f"kill@rank=1,step=5;{RANDOM};stop:1@rank=7"


@pytest.fixture(autouse=True)
def elastic_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALLSTEP_STORE", "ALLSTEP_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(TICKET, "4-secret")
    # It is set by `begin`.
    monkeypatch.setenv(FAULT_RANK, "9")
    monkeypatch.setenv(faults.VARIABLE, TEXT)
    monkeypatch.setattr(faults, "_has_begun", False)
    monkeypatch.setattr(faults, "active", None)
    monkeypatch.setattr("allstep.faults.injector.Injector.start_clock", lambda self: None)
    monkeypatch.setattr("atexit.register", lambda *_: None)


def test_what_has_occurred_does_not_occur_again_unless_it_is_random() -> None:
    occurred = frozenset(["kill@rank=1,step=5", "random:kill@every=2,seed=5"])
    assert WorkerFaults(1, occurred).left(TEXT) == f"{RANDOM};stop:1@rank=7"
    assert WorkerFaults(1).left(TEXT) == TEXT


def test_the_launchers_reply_holds_all() -> None:
    given = WorkerFaults(3, frozenset(["nan", "flip"]), 1.5)
    assert WorkerFaults.of_reply(json.loads(json.dumps(given.to_reply()))) == given


def test_a_rank_that_the_world_does_not_have_is_no_error() -> None:
    """A later world may have it; the launcher refuses ranks that no world can have."""
    faults.begin(0, 2, WorkerFaults(1, frozenset(["kill@rank=1,step=5"])))
    assert faults.active is not None and faults.active.rank == 1
    # For worker processes of loaders.
    assert os.environ[faults.VARIABLE] == f"{RANDOM};stop:1@rank=7"


def test_a_loader_process_has_the_faults_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the rank of the worker in its world has changed."""
    monkeypatch.setenv(faults.VARIABLE, "corrupt@rank=1,sample=7;corrupt@rank=0,sample=8")
    faults.begin(1, 3, WorkerFaults(1))
    for name, value in World(0, 2, 0, 2, 0, 1, "h", "allstep").to_env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(faults, "active", None)
    faults.begin_helper("corrupt")
    assert faults.active is not None and faults.active.rank == 1
    assert faults.active.corrupts([7]) and not faults.active.corrupts([8])
    # A fixed world that such a worker starts has ranks of its own.
    monkeypatch.delenv(TICKET)
    monkeypatch.setattr(faults, "active", None)
    monkeypatch.setattr(faults, "_has_begun", False)
    faults.begin(0, 3)
    assert FAULT_RANK not in os.environ


def test_a_fixed_world_checks_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TICKET)
    with pytest.raises(ConfigError, match="there is no rank 7 among 2 workers"):
        faults.begin(0, 2)


def test_a_worker_whose_faults_have_all_occurred_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "kill@rank=1,step=5;nan")
    faults.begin(1, 2, WorkerFaults(1, frozenset(["kill@rank=1,step=5", "nan"])))
    assert faults.active is None and os.environ[faults.VARIABLE] == ""


def test_a_worker_that_joins_later_continues_the_random_sequence() -> None:
    """Its reference is the sequence of the run, whose clock started earlier."""
    spec = parse(RANDOM)
    assert isinstance(spec, RandomFaults)
    all_times = [each.seconds for each in islice(sequence(spec, 3), 60) if each.rank == 2]
    times = [each for each in all_times if each is not None]
    skipped = times[3] + 0.01
    schedule, found = Schedule([spec], 2, 3, skipped), []
    for time in times[4:8]:
        assert schedule.next_time == pytest.approx(time - skipped, abs=0.002)
        found += schedule.at_time(time - skipped + 0.002)
    assert [each.origin for each in found] == [str(spec)] * 4


def test_a_rank_above_those_of_its_world_has_a_sequence_too() -> None:
    assert Schedule([parse(RANDOM)], 5, 2).next_time is not None
