"""The runner with trials that train nothing: what is run, what is not run again, what goes on, what
is stopped, what is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allstep.errors import ConfigError
from allstep.runlog import RunRecord
from allstep.study import Outcome, Study, StudyFolder, Trial, run
from allstep.study.batch.remedies import chosen
from allstep.study.batch.study import BatchGrid, parse_seeds
from allstep.study.batch.table import BatchTable
from allstep.study.runner import State, StudyCallback, collect
from allstep.study.study import grid
from allstep.study.trial import Results
from support import fake_trials
from support.fake_trials import END, Steps, fake, lines


class Told(StudyCallback):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.names: list[str] = []

    def state(self, state: State) -> None:
        self.states.append(state)

    def ended(self, outcome: Outcome, seconds: float) -> None:
        self.names.append(outcome.trial.name)


def asked(*trials: Trial) -> Study:
    return grid(trials, {"names": [trial.name for trial in trials]})


def statuses(results: Results) -> dict[str, str]:
    return {name: outcome.status for name, outcome in results.items()}


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


@pytest.mark.usefixtures("processes")
def test_a_grid_runs_once(tmp_path: Path) -> None:
    study = asked(*(fake(name, lines([0.5], test=0.6)) for name in "abc"))
    first, again = Told(), Told()
    results = run(study, StudyFolder(tmp_path), 2, first)
    assert statuses(results) == {"a": "done", "b": "done", "c": "done"}
    assert results["a"].record.evals[-1]["accuracy"] == 0.6
    assert sorted(first.names) == ["a", "b", "c"]
    assert (
        run(study, StudyFolder(tmp_path), 2, again)
        == results
        == collect(study, StudyFolder(tmp_path))
    )
    assert again.names == []
    assert again.states[-1].total == 3 and not again.states[-1].running


@pytest.mark.usefixtures("processes")
def test_trials_wait_for_their_cores_in_their_order(tmp_path: Path) -> None:
    """`wide` needs both cores, so it runs alone; `last` needs one, and does not overtake it."""

    wide = fake("wide", [["touch", f"{tmp_path}/wide"], *lines([0.5], test=0.6)], cores=2)
    names: list[list[str]] = []

    class Watching(StudyCallback):
        def state(self, state: State) -> None:
            names.append(sorted(state.running))

    study = asked(
        fake(
            "one",
            [["touch", f"{tmp_path}/one"], ["wait", f"{tmp_path}/two"], *lines([0.5], test=0.6)],
        ),
        fake(
            "two",
            [["touch", f"{tmp_path}/two"], ["wait", f"{tmp_path}/one"], *lines([0.5], test=0.6)],
        ),
        wide,
        fake("last", lines([0.5], test=0.6)),
    )
    results = run(study, StudyFolder(tmp_path / "study"), 4, Watching(), cores=2)
    assert set(statuses(results).values()) == {"done"}
    assert ["one", "two"] in names
    assert all(each == ["wide"] for each in names if "wide" in each)
    assert all(each == ["last"] for each in names if "last" in each)
    # A trial that needs more than there is runs alone.
    huge = asked(fake("huge", lines([0.5], test=0.6), cores=64))
    assert statuses(run(huge, StudyFolder(tmp_path / "huge"), 4, cores=2)) == {"huge": "done"}


@pytest.mark.usefixtures("processes")
def test_one_trial_in_each_lane(tmp_path: Path) -> None:
    """Each of two waits for the other, so they run at once; in one lane the second begins after the
    first."""

    def meet(mine: str, other: str) -> Steps:
        return [
            ["touch", f"{tmp_path}/{mine}"],
            ["wait", f"{tmp_path}/{other}"],
            *END,
        ]

    run(
        asked(fake("a", meet("A", "B")), fake("b", meet("B", "A"))),
        StudyFolder(tmp_path / "two"),
        2,
    )
    told = Told()
    run(asked(fake("c", END), fake("d", END)), StudyFolder(tmp_path / "one"), 1, told)
    assert told.names == ["c", "d"]
    assert max(len(state.running) for state in told.states) == 1


@pytest.mark.usefixtures("processes")
def test_a_failure_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    bad = fake("bad", [["say", "line one"], ["say", "the cause"], ["exit", 3]])
    study, folder = (
        asked(bad, fake("good", END), fake("odd", [["say", "no record"]])),
        StudyFolder(tmp_path),
    )
    results = run(study, folder, 1)
    assert statuses(results) == {"bad": "failed", "good": "done", "odd": "failed"}
    assert results["bad"].reason == "exit status 3\nline one\nthe cause"
    assert results["odd"].reason.startswith("its process ended without an `end` line")
    told = Told()
    assert statuses(run(study, folder, 1, told)) == statuses(results) and told.names == []
    run(study, folder, 1, told, retry=True)
    assert sorted(told.names) == ["bad", "odd"]


@pytest.mark.usefixtures("processes")
def test_what_was_cut_goes_on(tmp_path: Path) -> None:
    """One has a way to go on, one begins anew, and one saved itself and asked to be started again."""
    half = lines([0.5])
    can = fake("can", half, lines([0.6], first=1, test=0.7))
    cannot = fake("cannot", lines([0.5], test=0.6))
    saved = fake("saved", [*half, ["exit", 75]], lines([0.6], first=1, test=0.7))
    folder = StudyFolder(tmp_path)
    for trial in (can, cannot):
        folder.run(trial).mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for _, line in half) + '{"torn'
        (folder.run(trial) / "run.jsonl").write_text(
            text if trial is cannot else text.removesuffix('{"torn')
        )
        (folder.run(trial) / "left").touch()
    study = asked(can, cannot, saved)
    assert statuses(run(study, folder, 2)) == {"can": "done", "cannot": "done"}
    results = run(study, folder, 2)
    assert statuses(results) == {"can": "done", "cannot": "done", "saved": "done"}
    assert [len(results[name].record.starts) for name in ("can", "cannot", "saved")] == [2, 1, 2]
    assert (folder.run(can) / "left").exists() and not (folder.run(cannot) / "left").exists()


@pytest.mark.usefixtures("processes")
def test_a_rule_stops_trials(tmp_path: Path) -> None:
    def stop(trial: Trial, record: RunRecord, results: Results) -> str | None:
        late = "quick" in results and len(record.steps) == 2
        return f"two epochs, and {results['quick'].status} is quick" if late else None

    slow = fake("slow", [*lines([0.1, 0.2]), ["wait", "{run}/never"]])
    quick = fake("quick", [["wait", f"{tmp_path}/runs/slow/run.jsonl"], *END])
    study = Study({}, lambda results: [slow, quick], 2, stop)
    results = run(study, StudyFolder(tmp_path), 2)
    assert statuses(results) == {"quick": "done", "slow": "stopped"}
    assert results["slow"].reason == "two epochs, and done is quick"
    assert len(results["slow"].record.steps) == 2
    told = Told()
    assert run(study, StudyFolder(tmp_path), 2, told) == results and told.names == []


@pytest.mark.usefixtures("processes")
def test_a_search_wants_more_with_each_result(tmp_path: Path) -> None:
    """Halves an interval: a trial depends on how good the last was.

    Asked again it wants the same, and runs nothing.
    """

    def wanted(results: Results) -> list[Trial]:
        low, high, trials = 0, 16, []
        while high - low > 1:
            middle = (low + high) // 2
            trials.append(
                fake(f"at{middle}", lines([1 / (1 + abs(middle - 11))], test=float(middle <= 11)))
            )
            if trials[-1].name not in results:
                return trials
            good = results[trials[-1].name].record.evals[-1]["accuracy"]
            low, high = (middle, high) if good else (low, middle)
        return trials

    study, told = Study({}, wanted, most=4), Told()
    results = run(study, StudyFolder(tmp_path), 2, told)
    assert told.names == list(results) == ["at8", "at12", "at10", "at11"]
    assert told.states[0].total == 4 and told.states[0].at_most
    assert list(run(study, StudyFolder(tmp_path), 2)) == told.names


@pytest.mark.usefixtures("processes")
def test_a_forecast_comes_from_the_first_steps(tmp_path: Path) -> None:
    """3 s of record for each epoch; so it is 3 s for the last of four, and 12 s for the run after."""
    begun = [*lines([0.1, 0.2, 0.3]), ["wait", "{run}/never"]]
    study = asked(*(fake(name, begun, epochs=4, seconds=100.0) for name in "ab"))
    told = Told()
    run(study, StudyFolder(tmp_path), 1, told, until=lambda state: state.seconds_left is not None)
    assert told.states[-1].seconds_left == pytest.approx(3 + 12)
    assert told.states[-1].running == {"a": 0.75}
    assert told.states[0].total == 2 and not told.states[0].at_most


def test_another_study_in_the_folder_is_refused(tmp_path: Path) -> None:
    study = Study(
        {"epochs": 3, "goal": 0.8, "seeds": {"a": 1}},
        lambda results: [],
        0,
        growing=frozenset({"seeds"}),
    )
    folder = StudyFolder(tmp_path)
    run(study, folder, 1)
    other = Study(
        {"epochs": 4, "seeds": {"b": 1}}, lambda results: [], 0, growing=frozenset({"seeds"})
    )
    complaint = (
        'holds another study: epochs was 3, now 4; goal was 0.8, now not given; seeds was {"a": 1},'
        ' now {"b": 1}; give the same arguments, or another folder with --out'
    )
    with pytest.raises(ConfigError) as caught:
        run(other, folder, 1)
    assert complaint in str(caught.value)
    more = Study(
        {**study.arguments, "seeds": {"a": 3, "b": 1}}, study.wanted, 0, growing=study.growing
    )
    run(more, folder, 1)
    with pytest.raises(ConfigError, match="seeds was"):
        run(study, folder, 1)
    (tmp_path / "study.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not the description of a study"):
        run(study, folder, 1)


def test_two_runners_in_a_folder(tmp_path: Path) -> None:
    study, folder = asked(), StudyFolder(tmp_path)
    with folder.held(study), pytest.raises(ConfigError, match="another process runs a study here"):
        run(study, StudyFolder(tmp_path), 1)
    assert run(study, folder, 1) == {}


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match="cannot be written: Not a directory; give another folder"
    ):
        run(asked(), StudyFolder(tmp_path / "file" / "study"), 1)


def test_a_name_must_be_a_folder_s() -> None:
    with pytest.raises(ValueError, match=r"found '\.\./up'"):
        fake("../up", [])


# A runner that is ended from outside.


def start(folder: Path, trials: dict[str, tuple[Steps, Steps | None]]) -> subprocess.Popen[bytes]:
    (folder / "trials.json").write_text(json.dumps(trials))
    words = [
        sys.executable,
        fake_trials.__file__,
        str(folder / "study"),
        str(folder / "trials.json"),
    ]
    return subprocess.Popen(words, stderr=subprocess.DEVNULL)


def processes_in(folder: Path) -> list[int]:
    """Those that have the folder in their command line."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in each.read_bytes():
                found.append(int(each.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.usefixtures("processes")
@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_runner_that_is_ended_leaves_no_process_and_can_go_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The reference: the same study that nobody disturbed, and its table."""
    asked_ = BatchGrid(
        "digits",
        (),
        64,
        3,
        0.6,
        chosen(["plain", "lars"]),
        parse_seeds("1", [64, 256], ["plain", "lars"]),
    )
    names = [trial.name for trial in asked_.trials()]
    good = dict(zip(names, (0.7, 0.8, 0.9, 0.5), strict=True))
    resumed = {name: lines([0.6, good[name]], first=1, test=good[name]) for name in names}
    calm = {name: (lines([0.5]) + steps, steps) for name, steps in resumed.items()}
    stay: Steps = [["child", "{run}/pid"], ["wait", "{run}/never"]]
    cut = names[
        1:3
    ]  # the first ends before; both lanes are taken by these two; the last never begins
    disturbed = {
        **calm,
        **{
            name: ([*lines([0.5, 0.6][:n]), *stay], resumed[name])
            for n, name in enumerate(cut, start=1)
        },
    }
    with start(tmp_path, disturbed) as process:
        pids = [tmp_path / "study" / "runs" / name / "pid" for name in cut]
        until(lambda: all(pid.exists() for pid in pids))
        left = [int(pid.read_text()) for pid in pids]
        process.send_signal(number)
        process.wait()
    if number == signal.SIGINT:
        assert processes_in(tmp_path) == []
    until(lambda: processes_in(tmp_path) == [])
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    results = run(fake_trials.fake_study(disturbed), StudyFolder(tmp_path / "study"), 2)
    expected = run(fake_trials.fake_study(calm), StudyFolder(tmp_path / "calm"), 2)
    assert statuses(results) == statuses(expected) == dict.fromkeys(names, "done")
    assert all(len(results[name].record.starts) == 2 for name in cut)
    assert BatchTable(asked_, results).markdown() == BatchTable(asked_, expected).markdown()
    assert not os.listdir(tmp_path / "study" / "ended")
