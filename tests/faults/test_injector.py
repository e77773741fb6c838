"""The points of a process: reports, effects for the caller, and what happens without faults."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from allstep import faults
from allstep.errors import ConfigError
from allstep.faults import InjectedFault, inject
from allstep.faults.acts import ACTS
from allstep.faults.missing import name_missing
from allstep.faults.reports import Occurred, from_json
from allstep.world import places


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ALLSTEP_STORE", "ALLSTEP_TOKEN", faults.VARIABLE, faults.AGENT):
        monkeypatch.delenv(name, raising=False)
    yield
    assert faults.active is None


def test_a_fault_is_reported_before_it_occurs(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Occurred] = []
    with inject("raise@step=2") as injector:
        injector.reports.listen(seen.append)
        injector.at_step(1)
        with pytest.raises(InjectedFault, match="injected by fault raise@step=2"):
            injector.at_step(2)
        injector.at_step(2)
    line = "fault raise@step=2: rank 0 raises InjectedFault at step 2"
    assert [str(each) for each in seen] == [line]
    assert capsys.readouterr().err == f"allstep: {line}\n"


def test_a_repeated_fault_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    with inject("nan@step=2-3") as injector:
        found = []
        for step in range(1, 5):
            injector.at_step(step)
            found.append((injector.has("nan"), injector.takes("nan"), injector.has("nan")))
    assert found == [(False,) * 3, (True, True, False), (True, True, False), (False,) * 3]
    assert capsys.readouterr().err.count("\n") == 1


def test_steps_of_a_script_are_counted_by_their_ends() -> None:
    with inject("nan@step=2") as injector:
        assert injector.in_step() and not injector.in_step()
        assert not injector.has("nan")
        injector.step_ends()
        assert injector.in_step()
        assert injector.has("nan")


def test_a_script_that_catches_a_fault_continues_with_the_next_step() -> None:
    with inject("raise@step=1", "raise@step=2,during=reduce", "nan@step=3-4") as injector:
        with pytest.raises(InjectedFault):
            injector.in_step()
        assert injector.in_step() and not injector.has("nan")
        with pytest.raises(InjectedFault):
            injector.reduce_begins()
        assert injector.in_step() and injector.has("nan")
        # The step failed on another rank; the world forms again.
        injector.in_phase("forming")
        assert injector.in_step() and injector.has("nan")


def test_a_step_that_was_stopped_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTS, "stop", lambda fault: None)
    with inject("stop:1@step=1", "nan@step=2") as injector:
        assert injector.in_step() and not injector.in_step()
        injector.step_ends()
        assert injector.in_step() and injector.has("nan")


def test_timed_faults_wait_for_a_point_that_can_carry_them_out() -> None:
    with inject("flip@seconds=0", "raise@seconds=0") as injector:
        while len(injector._waiting) < 2:
            injector._ended.wait(0.001)
        with pytest.raises(InjectedFault):
            injector.at_op()
        assert injector.in_step(unable=("flip",)) and not injector.has("flip")
        injector.step_ends()
        assert injector.in_step() and injector.takes("flip")


def test_the_phases_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with inject("raise@step=1,during=reduce", "raise@step=1,during=update") as injector:
        injector.at_step(1)
        with pytest.raises(InjectedFault):
            injector.reduce_begins()
        with pytest.raises(InjectedFault):
            injector.update_begins()
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("InjectedFault ")[2] for line in lines] == [
        "during the reduction of step 1",
        "during the update of step 1",
    ]


def test_a_full_disk() -> None:
    with inject("disk-full@commit=2") as injector:
        injector.at_write("x")
        with pytest.raises(OSError, match="injected") as raised:
            injector.at_write("x")
        assert raised.value.errno == errno.ENOSPC
        injector.at_write("x")


def test_a_record_is_damaged_where_it_is_read() -> None:
    with inject("corrupt@sample=3") as injector:
        assert injector.corrupts([1, 3]) and not injector.corrupts([1, 2])
        with injector.reading(2):
            assert injector.changed(bytes(20)) is None
        with injector.reading(3):
            damaged = injector.changed(bytes(20))
            # What follows from damaged bytes is not damaged a second time.
            assert injector.changed(bytes(20)) is None
        assert injector.changed(bytes(20)) is None
    assert damaged is not None and len(damaged) == 20
    assert damaged.count(b"\xff") == 8 and damaged[6:14] == b"\xff" * 8


def test_the_world_decides_which_faults_are_mine() -> None:
    world = places(["a", "a"])[1]
    with inject("raise@rank=1,step=1", world=world) as injector, pytest.raises(InjectedFault):
        injector.at_step(1)
    with inject("raise@rank=1,step=1", world=places(["a", "a"])[0]) as injector:
        injector.at_step(1)


def test_a_handler_carries_out_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setitem(faults._handlers, "cut", lambda: called.append("cut"))
    with inject("cut@op=2") as injector:
        assert injector.counts_ops
        injector.at_op()
        assert called == []
        injector.at_op()
    assert called == ["cut"]


def test_kill_agent_needs_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="this process has no agent"), inject("kill-agent@step=1"):
        pass
    monkeypatch.setenv(faults.AGENT, "4711")
    with inject("kill-agent@step=1"):
        pass


def test_inject_restores_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with inject("nan") as outer:
        with inject("flip@step=9"):
            assert faults.active is not outer
        assert faults.active is outer
    assert faults.active is None


def test_a_wrong_variable_is_an_error_of_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "kill@rank=7")
    for rank, expected in ((0, ConfigError), (1, SystemExit)):
        monkeypatch.setattr(faults, "_has_begun", False)
        with pytest.raises(expected) as raised:
            faults.begin(rank, 2)
        assert getattr(raised.value, "exit_code", getattr(raised.value, "code", None)) == 2


def test_the_variable_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_has_begun", False)
    faults.begin(0, 1)
    monkeypatch.setenv(faults.VARIABLE, "kill@step=1")
    faults.begin(0, 1)
    assert faults.active is None


def test_records_survive_a_hostile_store() -> None:
    occurred = Occurred("kill@step=1", 3, "rank 3 kills itself")
    assert from_json(occurred.to_json()) == occurred
    for record in (
        None,
        b"",
        b"[" * 100_000,
        b"7",
        b'{"fault": 1, "rank": "x", "text": 0}',
        b"\xff",
    ):
        assert from_json(record) is None


def test_missing_faults_are_named_once() -> None:
    assert name_missing(["a@step=1", "b", "a@step=1"], {"b"}) == ["fault a@step=1 did not occur"]


# Without faults


def test_without_faults_a_point_is_one_comparison() -> None:
    """Every use of `faults.active` outside of the package is behind a comparison with None."""
    source = Path(faults.__file__).parent.parent
    points = 0
    for path in source.rglob("*.py"):
        if path.parent == source / "faults":
            continue
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if "faults.active" not in line:
                continue
            nearby = "\n".join(lines[max(0, number - 4) : number + 1])
            assert (
                "faults.active is not None" in nearby
                or "faults.active is None" in nearby
                or ("injector = faults.active" in line)
            ), f"{path}:{number + 1}"
            points += 1
    assert points > 20
