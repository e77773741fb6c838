"""Records as TensorFlow's tutorials write them, with labels as text, through every command: info,
verify, pack, train, eval, predict."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import allstep
from allstep import runlog
from allstep.cli.app import app
from allstep.data.opening import open_source
from allstep.data.packing.pack import pack
from allstep.data.packing.shard_plan import Options
from allstep.errors import ConfigError, DataError
from allstep.train import read_config
from allstep.train.config.data_config import DataConfig
from allstep.train.config.run_config import RunConfig
from allstep.train.folder.claim import claim_folder
from allstep.train.folder.existing_run import Evaluation
from allstep.train.input.splits import Splits, open_splits
from allstep.train.run.loop import train
from allstep.train.use.evaluate import reevaluate
from allstep.train.use.predict import find_images, load_run, predict
from allstep.train.watch.record_callback import Record
from support.image_folders import image
from support.tutorial_records import write_labels, write_tutorial

NAMES = [b"tench", b"goldfish", b"hen"]
SORTED = ("goldfish", "hen", "tench")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """60 records in two shards."""
    labels = [NAMES[row % 3] for row in range(60)]
    write_tutorial(tmp_path / "course" / "a.tfrecord", labels[:30])
    write_tutorial(tmp_path / "course" / "b.tfrecord", labels[30:])
    return tmp_path / "course"


def command(*arguments: Any, code: int = 0) -> str:
    """What a command prints; its exit status must be `code`."""
    result = CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def opened(where: Path, **section: Any) -> Splits:
    data = DataConfig(name="mine", train=str(where), workers=0, **section)
    return open_splits(RunConfig(recipe="mine", batch=8, data=data))


def run(arguments: list[str], out: Path) -> None:
    world = allstep.init()
    config = read_config("digits", arguments)
    callbacks = []
    if world.rank == 0:
        claim_folder(config.resolved(world.size), out)
        callbacks.append(Record(runlog.RunLog(out / "run.jsonl")))
    train(config, world, out, callbacks)


def evaluated(out: Path, place: Path) -> tuple[float, int, int]:
    found = reevaluate(Evaluation(out, place=str(place)), allstep.init())
    return found.score.accuracy, found.score.count, found.num_bad


class TestCommands:
    def test_info_shows_how_labels_are_stored_and_the_classes(
        self, course: Path, tmp_path: Path
    ) -> None:
        shown = command("data", "info", course, "--json", tmp_path / "info.json")
        assert (
            "label: text, class names, numbered by sorted order (3 classes)" in shown
            and "no class" not in shown
        )
        assert all(re.search(rf"{name} +20 ", shown) for name in SORTED)
        assert json.loads((tmp_path / "info.json").read_text())["labels"].startswith(
            "label: text, class names"
        )

    def test_verify_counts_bad_labels(self, course: Path, tmp_path: Path) -> None:
        assert "all 60 samples are good" in command("data", "verify", course)
        (course / "classes.txt").write_text("tench\nhen\n")
        listed = tmp_path / "bad.jsonl"
        shown = command("data", "verify", course, "--list", listed, code=1)
        assert (
            "20 of 60 samples are bad" in shown and "'goldfish' is not one of the 2 names" in shown
        )
        assert [json.loads(line)["number"] for line in listed.read_text().splitlines()] == list(
            range(1, 60, 3)
        )

    @pytest.mark.parametrize("to", ["tfrecord", "tar"])
    def test_pack_writes_numbers_and_names(self, course: Path, tmp_path: Path, to: str) -> None:
        command("data", "pack", course, tmp_path / "packed", "--to", to, "--max-side", 20)
        packed = open_source(tmp_path / "packed")
        assert (tmp_path / "packed" / "classes.txt").read_text().split() == list(SORTED)
        assert (
            packed.classes == SORTED
            and packed.targets().tolist() == open_source(course).targets().tolist()
        )
        assert packed.labeling.kind == ("numbers" if to == "tfrecord" else "text, integers")
        shown = command("data", "info", tmp_path / "packed")
        assert all(re.search(rf"{name} +20 ", shown) for name in SORTED)

    def test_a_packed_record_keeps_other_features_but_no_size_that_is_wrong_now(
        self, course: Path, tmp_path: Path
    ) -> None:
        from allstep.data.packing.source import with_all_features
        from allstep.data.sources.tfrecord.source import TFRecordSource

        command("data", "pack", course, tmp_path / "packed", "--max-side", 20)
        fields = dict(with_all_features(TFRecordSource(tmp_path / "packed")).read(7).fields)
        assert (
            sorted(fields) == ["Image shapes", "filename", "shape"]
            and fields["filename"] == b"007.jpg"
        )

    def test_what_cannot_be_packed_is_left_out(self, course: Path, tmp_path: Path) -> None:
        write_tutorial(course / "c.tfrecord", [b"tench", b"", b"\xff\xfe", 3])
        command("data", "pack", course, tmp_path / "packed")
        lines = (tmp_path / "packed" / "quarantine.jsonl").read_text().splitlines()
        assert [json.loads(line)["number"] for line in lines] == [61, 62, 63]
        assert (
            "expected text as in most samples" in lines[2]
            and len(open_source(tmp_path / "packed")) == 61
        )

    def test_a_pack_does_not_continue_with_another_numbering(
        self, course: Path, tmp_path: Path
    ) -> None:
        def again() -> None:
            pack(open_source(course), str(course), tmp_path / "packed", Options("x"))

        again()
        again()
        (course / "classes.txt").write_text("tench\nhen\ngoldfish\n")
        with pytest.raises(DataError, match="which has changed since; give --overwrite"):
            again()

    def test_labels_that_are_no_text_are_one_line(self, tmp_path: Path) -> None:
        write_tutorial(tmp_path / "set" / "x.tfrecord", [bytes([row, 255]) for row in range(20)])
        shown = command("data", "info", tmp_path / "set")
        assert (
            "none can be read; the first: its label is bytes but not text" in shown
            and "20 samples" in shown
        )
        with pytest.raises(
            DataError, match=r"no label can be read; the first: .*bytes but not text: b'\\x00\\xff'"
        ) as e:
            opened(tmp_path / "set")
        assert "\n" not in str(e.value)
        with pytest.raises(
            DataError, match=r"none of 8 samples tried can be packed; sample 0 .*bytes but not text"
        ):
            pack(open_source(tmp_path / "set"), "x", tmp_path / "packed", Options("x"))


class TestClassesOfARun:
    def test_names_are_the_classes(self, course: Path) -> None:
        assert opened(course, prepare="CentreCrop(16)", augment="CentreCrop(16)").classes == SORTED

    def test_integers_as_text_are_as_numbers_are(self, tmp_path: Path) -> None:
        where = write_tutorial(
            tmp_path / "x.tfrecord", [b"%d" % (row % 5 + 1) for row in range(40)]
        )
        with pytest.raises(
            ConfigError, match=r"do not state how many classes there are: set data\.num_classes"
        ):
            opened(where)
        parts = opened(where, labels_from=1, num_classes=5)
        assert parts.classes == ("0", "1", "2", "3", "4") and parts.train.source.read(4).target == 4
        where.with_name("classes.txt").write_text("".join(f"{name}\n" for name in "abcdef"))
        assert opened(where).classes == tuple("abcdef")

    def test_validation_is_numbered_as_training_is(self, course: Path, tmp_path: Path) -> None:
        """It has only two of the three names, and one that training has not."""
        other = write_tutorial(tmp_path / "val" / "x.tfrecord", [b"tench", b"hen", b"shark"])
        parts = opened(course, validation=str(other), test=10)
        assert parts.classes == SORTED
        source = parts.validation.source
        assert [source.read(0).target, source.read(1).target] == [2, 1]
        with pytest.raises(DataError, match="'shark' is not one of the 3 names"):
            source.read(2)

    def test_a_number_of_classes_that_is_not_that_of_the_names(self, course: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"has 3 classes \('goldfish', 'hen', 'tench'\), found 4"
        ):
            opened(course, num_classes=4)

    def test_numbers_still_ask(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="do not state how many classes"):
            opened(write_labels(tmp_path / "x.tfrecord", [0, 1, 2] * 10))


def test_train_eval_and_predict_show_names(ranks: Any, course: Path, tmp_path: Path) -> None:
    """Two ranks; the same records, packed, score the same."""
    write_tutorial(course / "c.tfrecord", [b"tench", b"", b"hen"])
    out = tmp_path / "out"
    arguments = [
        f"data.train={course}",
        "data.augment=CentreCrop(16)",
        "data.prepare=CentreCrop(16)",
        "batch=16",
        "epochs=1",
    ]
    arguments += [
        "model=small-cnn",
        "model.options.widths=[4]",
        "model.options.hidden=8",
        "data.workers=0",
        "data.test=9",
    ]
    ranks(2, run, arguments, out)
    record = runlog.read(out / "run.jsonl")
    assert record.end is not None and record.end["num_bad"] == 1
    confusion = json.loads((out / "mistakes" / "confusion.json").read_text())
    assert tuple(confusion["classes"]) == SORTED

    command("data", "pack", course, tmp_path / "packed")
    (stored, packed) = (
        ranks(1, evaluated, out, where)[0] for where in (course, tmp_path / "packed")
    )
    assert stored == (packed[0], 62, 1) and packed[1:] == (62, 0)

    (tmp_path / "new").mkdir()
    Image.Image.save(image(0, 24, 32), tmp_path / "new" / "x.jpg")
    (found,) = predict(load_run(out), find_images([str(tmp_path / "new")]))
    assert {name for name, _ in found.classes} == set(SORTED)
