"""Verify a dataset: exactly the planted bad samples are found."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.data.inspect.verify import verify
from allstep.data.opening import open_source
from allstep.data.sources.tfrecord.example import encode
from allstep.data.sources.tfrecord.framing import frame
from support.image_folders import encoded, make_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 images; the last one of `cat` and of `eel` are PNG."""
    return make_folder(tmp_path / "photos")


def plant(folder: Path) -> list[int]:
    """Damage images 2 (cut JPEG), 7 (cut PNG), 9 (no image), 20 (empty)."""
    files = [path for part in sorted(folder.iterdir()) for path in sorted(part.iterdir())]
    for number, content in (
        (2, encoded(2)[:-60]),
        (7, encoded(7, kind="PNG")[:90]),
        (9, b"GIF8 it is not"),
        (20, b""),
    ):
        files[number].write_bytes(content)
    return [2, 7, 9, 20]


def test_a_good_folder(folder: Path) -> None:
    reported: list[tuple[int, int, int]] = []
    found = verify(open_source(str(folder)), progress=lambda *figures: reported.append(figures))
    assert (found.num_samples, found.bad) == (24, ())
    assert reported[-1] == (24, 24, 0)


@pytest.mark.parametrize("jobs", [1, 4])
def test_planted_images_are_found(folder: Path, jobs: int) -> None:
    planted = plant(folder)
    found = verify(open_source(str(folder)), jobs=jobs)
    assert [bad.number for bad in found.bad] == planted


def test_planted_damage_of_records(tmp_path: Path) -> None:
    records = [frame(encode({"image": encoded(n), "label": n % 3})) for n in range(40)]
    # The checksum detects this damage, only a decoder the next.
    records[5] = records[5][:100] + bytes([records[5][100] ^ 1]) + records[5][101:]
    records[11] = frame(encode({"image": encoded(11)[:300], "label": 1}))
    records[17] = frame(encode({"label": 1}))
    records[23] = frame(encode({"image": encoded(23), "label": 3}))  # there are 3 classes
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.tfrecord").write_bytes(b"".join(records))
    (tmp_path / "set" / "classes.txt").write_text("a\nb\nc\n")
    found = verify(open_source(str(tmp_path / "set")))
    assert [bad.number for bad in found.bad] == [5, 11, 17, 23]
    assert [bad.place.offset for bad in found.bad] == [
        sum(map(len, records[:n])) for n in (5, 11, 17, 23)
    ]


def test_arrays_have_nothing_to_decode(tmp_path: Path) -> None:
    from allstep.data.sources.arrays import ArraySource

    source = ArraySource(np.zeros((5, 4, 4), np.uint8), np.zeros(5, np.int64))
    assert verify(source).bad == ()


class TestTheCommand:
    def test_all_good(self, folder: Path) -> None:
        outcome = CliRunner().invoke(app, ["data", "verify", str(folder)])
        assert outcome.exit_code == 0, outcome.output
        assert "all 24 samples are good" in outcome.stdout

    def test_some_bad(self, folder: Path, tmp_path: Path) -> None:
        planted = plant(folder)
        outcome = CliRunner().invoke(
            app, ["data", "verify", str(folder), "--list", str(tmp_path / "bad.jsonl")]
        )
        assert outcome.exit_code == 1
        assert "4 of 24 samples are bad" in outcome.stdout
        lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
        assert [line["number"] for line in lines] == planted
        assert all(Path(line["file"]).exists() and line["reason"] for line in lines)

    @pytest.mark.parametrize(
        "arguments", [["/no/such/set"], ["{folder}", "--list", "/no/such/folder/x"]]
    )
    def test_bad_input_is_one_line(self, folder: Path, arguments: list[str]) -> None:
        outcome = CliRunner().invoke(
            app, ["data", "verify", *(argument.format(folder=folder) for argument in arguments)]
        )
        assert getattr(outcome.exception, "exit_code", None) == 2
        assert "\n" not in str(outcome.exception)
