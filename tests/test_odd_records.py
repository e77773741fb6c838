"""A run record of another person or a damaged disk: readers skip what is odd, and keep the rest."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from allstep import runlog
from allstep.errors import ConfigError, DataError
from allstep.report import write_report
from allstep.study.folder import StudyFolder
from allstep.study.forecast import Forecast
from allstep.study.results import figures
from allstep.study.tail import Follower
from allstep.study.trial import Outcome, Trial
from allstep.train.folder.claim import has_ended
from allstep.train.folder.lock import check_free
from support.damaged_json import RAW, odd
from support.limited_process import limited, seeds
from support.special_files import ODD
from support.synthetic_runs import lines, write


def run_folder(folder: Path) -> Path:
    return write(folder, lines(epochs=2, per_epoch=3))


def study_reads(folder: Path) -> None:
    """All that a study looks at in the record of a run."""
    record = Follower(folder / "run.jsonl").record()
    trial = Trial("t", ("true",), epochs=2.0)
    forecast = Forecast()
    forecast.learn(trial, record, since=1.0)
    forecast.learn_end(trial, record, wall=1.0)
    for status in ("done", "failed"):
        outcome = Outcome(trial, status, record)
        forecast.learn_part(outcome)
        figures(outcome, 10, goal=0.5)
    assert forecast.left(trial, record) == forecast.left(trial, record)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("raw", RAW, ids=[each[:12] for each in RAW])
def test_an_odd_line_is_skipped(tmp_path: Path, raw: str) -> None:
    log = run_folder(tmp_path / "run") / "run.jsonl"
    before = runlog.read(log)
    content = log.read_text()
    odd_lines = f'{raw}\n{{"kind": "step", "time": 1, "samples": {raw}}}\n'
    log.write_text(odd_lines + content + odd_lines)

    def reads(folder: Path) -> None:
        found = runlog.read(folder / "run.jsonl")
        assert (found.starts, found.evals, found.end) == (before.starts, before.evals, before.end)
        assert Follower(folder / "run.jsonl").record() == found
        study_reads(folder)
        page = write_report([folder], folder / "page.html").read_text()
        assert "of its lines could not be read and were left out" in page
        assert has_ended(folder)

    limited(reads, [log.parent])


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", sorted(ODD))
def test_something_else_in_the_place_of_the_record(tmp_path: Path, kind: str) -> None:
    """One line for each reader and for the writer."""
    log = run_folder(tmp_path / "run") / "run.jsonl"
    log.unlink()
    ODD[kind](log)

    def one(reader: Callable[[Path], object]) -> None:
        text = ""
        try:
            reader(log.parent)
        except (ConfigError, DataError, OSError) as error:
            text = str(error)
        assert "\n" not in text

    readers: list[Callable[[Path], object]] = [has_ended, write_report_of, study_reads, append]
    assert limited(one, readers) == 4


def write_report_of(folder: Path) -> None:
    write_report([folder], folder / "page.html")


def append(folder: Path) -> None:
    with runlog.RunLog(folder / "run.jsonl") as log:
        log.event("something")


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", sorted(ODD))
@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "quarantine.jsonl",
        "checkpoints/000000000010/manifest.json",
        "mistakes/mistakes.json",
    ],
)
def test_something_else_in_the_place_of_what_a_report_reads(
    tmp_path: Path, name: str, kind: str
) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    ODD[kind](folder / name)
    limited(write_report_of, [folder])
    assert (folder / "page.html").exists()


@pytest.mark.parametrize("name", ["run.jsonl", "run.lock"])
def test_a_run_folder_cannot_name_a_file_to_write_to(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(precious)
    write = check_free if name == "run.lock" else append
    with pytest.raises((OSError, ConfigError), match="symbolic links"):
        write(tmp_path / "run")
    assert precious.read_text() == "mine"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("file", ["study.json", "ended/t.json"])
def test_odd_files_of_a_study(tmp_path: Path, file: str) -> None:
    folder = StudyFolder(tmp_path)
    trial = Trial("t", ("true",))
    note, study = {"status": "failed", "reason": "x"}, {"version": "0", "arguments": {}}
    good = study if file == "study.json" else note
    (tmp_path / file).parent.mkdir(exist_ok=True)

    def one(seed: int) -> None:
        content = RAW[seed].encode() if seed < len(RAW) else odd(good, seed)
        (tmp_path / file).write_bytes(content)
        for read in (folder.precision, lambda: folder.outcome(trial), folder.forget_failures):
            text = ""
            try:
                read()
            except ConfigError as error:
                text = str(error)
            assert "\n" not in text

    limited(one, range(100))
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)

    def refuses(read: Callable[[], object]) -> None:
        with pytest.raises(ConfigError, match="is not a regular file"):
            read()

    limited(refuses, [folder.precision if "study" in file else folder.forget_failures])


@pytest.mark.usefixtures("processes")
@pytest.mark.soak(1)  # its count is in `seeds`
@pytest.mark.timeout(1200)
def test_whatever_is_in_a_record_it_can_be_read(tmp_path: Path) -> None:
    log = run_folder(tmp_path / "run") / "run.jsonl"
    whole = [json.loads(line) for line in log.read_text().splitlines()]

    def one(seed: int) -> None:
        dice = random.Random(seed)
        made = [json.dumps(line).encode() for line in whole]
        for _ in range(dice.randint(1, 4)):
            number = dice.randrange(1, len(made))
            made[number] = odd(whole[number], dice.randrange(1 << 40))
        log.write_bytes(b"\n".join(made) + b"\n")
        runlog.read(log)
        has_ended(log.parent)
        study_reads(log.parent)
        if seed % 10 == 0:
            write_report_of(log.parent)

    assert limited(one, seeds(200)) >= 200
