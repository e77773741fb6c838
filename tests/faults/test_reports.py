"""Reports in the launcher's store: for the launcher, and for rank 0 of a training."""

from collections.abc import Iterator

import pytest

from allstep import faults, wire
from allstep.faults import inject, launcher_records
from allstep.faults.reports import Occurred, Reports
from allstep.launch.cause import Failure, headline
from allstep.wire import keys
from allstep.world import places


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[wire.Server]:
    token = wire.new_token()
    with wire.Server(token, "127.0.0.1") as server:
        monkeypatch.setenv("ALLSTEP_STORE", f"127.0.0.1:{server.port}")
        monkeypatch.setenv("ALLSTEP_TOKEN", token)
        yield server


def test_the_launcher_reads_what_ranks_record(store: wire.Server) -> None:
    first, second = places(["a", "a"])
    with inject("nan@step=2", "kill@step=900", world=second) as injector:
        injector.at_step(2)
    with inject("flip@rank=0,step=1", world=first) as injector:
        injector.at_step(1)
    assert launcher_records.occurred(store) == [
        Occurred("nan@step=2", 1, "rank 1 makes its loss NaN at step 2"),
        Occurred("flip@rank=0,step=1", 0, "rank 0 flips one bit of its weights at step 1"),
    ]
    assert launcher_records.last_of(store, {1}) == "nan@step=2"
    assert launcher_records.last_of(store, range(2)) == "flip@rank=0,step=1"
    assert launcher_records.last_of(store, {2}) == ""
    env = {faults.VARIABLE: "nan@step=2;kill@step=900;flip@step=1,rank=0"}
    assert launcher_records.missing(store, env) == ["fault kill@step=900 did not occur"]


def test_the_last_of_many_records_is_the_last(store: wire.Server) -> None:
    reports = Reports(1)
    for number in range(1, 12):
        reports.send(Occurred(f"nan@step={number}", 1, "text"))
    assert launcher_records.last_of(store, {1}) == "nan@step=11"


def test_records_that_are_none_are_ignored(store: wire.Server) -> None:
    store.set(keys.FAULTS, b"many")
    store.set(keys.fault_record(1), b"{}")
    assert launcher_records.occurred(store) == []


def test_a_listener_gets_the_faults_of_other_ranks_once(store: wire.Server) -> None:
    mine, other = Reports(0), Reports(1)
    seen: list[Occurred] = []
    before, after, own = (Occurred(f"kill@step={n}", n % 2, "text") for n in (1, 3, 2))
    other.send(before)
    mine.listen(seen.append)
    mine.poll(now=True)
    assert seen == [before]
    mine.send(own)
    other.send(after)
    mine.poll(now=True)
    mine.poll(now=True)
    assert seen == [before, own, after]


def test_a_worker_gets_the_faults_of_a_dead_one_with_its_rank(store: wire.Server) -> None:
    """In an elastic run, where a replacement takes over a rank."""
    dead, mine = Reports(0), Reports(0)
    seen: list[Occurred] = []
    first, own = (Occurred(f"kill@step={n}", 0, "text") for n in (1, 2))
    dead.send(first)
    mine.listen(seen.append)
    mine.send(own)
    mine.poll(now=True)
    assert seen == [own, first]


def test_a_store_that_is_lost_delays_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_STORE", "127.0.0.1:1")
    monkeypatch.setenv("ALLSTEP_TOKEN", wire.new_token())
    monkeypatch.setattr("allstep.faults.reports._STORE_SECONDS", 0.05)
    reports = Reports(0)
    reports.send(Occurred("kill@step=1", 0, "text"))
    assert reports.occurred == {"kill@step=1"}


def test_the_failure_report_names_the_fault() -> None:
    failure = Failure(1, "here", -9, 2.0, fault="kill@rank=1,step=3")
    assert headline(failure, 2, 1) == (
        "allstep run: rank 1 on here failed first of 2: killed by signal 9 (SIGKILL) (injected"
        " fault: kill@rank=1,step=3), 2.0 s after the start; 1 other was stopped"
    )


def test_the_launcher_names_faults_of_a_workers_own_command_line(
    store: wire.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `allstep train --fault` under `allstep run`, whichever of its workers have died."""
    monkeypatch.setattr(faults, "_added", [])
    monkeypatch.setattr(faults, "_has_begun", False)
    monkeypatch.setattr(faults, "active", None)
    monkeypatch.setattr("atexit.register", lambda *_: None)
    monkeypatch.setenv(faults.VARIABLE, "nan@step=2")
    faults.add(["kill@step=900", "flip@step=1"])
    faults.begin(1, 2)
    Reports(1).send(Occurred("flip@step=1", 1, "text"))
    env = {faults.VARIABLE: "nan@step=2"}
    lines = ["fault nan@step=2 did not occur", "fault kill@step=900 did not occur"]
    assert launcher_records.missing(store, env) == lines
    store.set(keys.FAULTS_GIVEN, b"{7")
    assert launcher_records.missing(store, env) == lines[:1]
