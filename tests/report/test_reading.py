"""What is read from a run folder: only what is there, and what is damaged is left out with a note.

Reference: what was written.
"""

import base64
import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from allstep.errors import DataError
from allstep.report import read_run, write_report
from allstep.report.mistakes import Confusion, read_mistakes
from allstep.report.run import read_runs
from support.synthetic_runs import BEGAN, lines, write, write_mistakes, write_rich


def test_a_folder_with_everything(tmp_path: Path) -> None:
    run = read_run(write_rich(tmp_path / "all", workers=4))
    assert (run.name, run.num_workers, run.num_threads) == ("all", 4, 4)
    assert run.config["recipe"] == "digits"
    assert (run.num_bad, run.bad[0]["reason"]) == (
        1,
        "cut short",
    )  # the torn second line is no sample
    assert [checkpoint.name for checkpoint in run.checkpoints] == ["000000001000", "000000008000"]
    assert run.checkpoints[0].files == (("weights.safetensors", 54824, "ab" * 32),)
    assert [mistake.label for mistake in run.mistakes[:2]] == [
        "shirt",
        "coat",
    ]  # numbers of classes have become names
    assert (
        run.mistakes[0].source
        == "data:image/png;base64,"
        + base64.b64encode((tmp_path / "all" / "mistakes" / "0000.png").read_bytes()).decode()
    )
    assert (run.mistakes[0].width, run.mistakes[0].height) == (28, 28)
    assert run.confusion is not None
    assert run.confusion.worst(2) == [("coat", "shirt", 11, 0.11), ("shirt", "coat", 8, 0.08)]
    assert run.notes == ()


def test_a_record_alone_is_a_run(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "bare", lines()))
    assert (run.checkpoints, run.mistakes, run.confusion, run.num_bad, run.notes) == (
        (),
        (),
        None,
        0,
        (),
    )
    assert list(run.checksums) == ["run.jsonl"]


def test_the_config_file_speaks_where_the_record_does_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "old", [{"kind": "start", "time": BEGAN}])
    (folder / "config.yaml").write_text("recipe: mine\nbatch: 32\n")
    assert read_run(folder).config == {"recipe": "mine", "batch": 32}
    (folder / "config.yaml").write_text("recipe: [\n")
    run = read_run(folder)
    assert run.config == {}
    assert run.notes == ("config.yaml: could not be read (ParserError)",)


def test_a_torn_last_line_is_left_out_and_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "torn", lines(end=False))
    whole = read_run(folder)
    with (folder / "run.jsonl").open("a") as file:
        file.write('{"kind": "step", "time": 17')
    run = read_run(folder)
    assert run.record == whole.record
    assert run.notes == ("run.jsonl: 1 of its lines could not be read and were left out",)


def test_kinds_and_keys_of_later_versions_are_no_damage(tmp_path: Path) -> None:
    later = [
        {"kind": "weather", "time": BEGAN, "rain": True},
        {"kind": "step", "samples": 1},
    ]  # the second has no time
    run = read_run(write(tmp_path / "later", [*lines(), *later]))
    assert run.notes == ()
    assert len(run.record.steps) == 80


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is not a run folder: it has no run.jsonl"),
        ("", "run.jsonl: is empty: the run has not started"),
        ('{"kind": "step", "time": 1, "samples": 3}\n', "has no start line in 42 bytes"),
        ("not json\n", "has no start line"),
        (b"\xff\xfe\x00", "has no start line"),
    ],
)
def test_what_is_no_run_is_said_in_a_line(
    tmp_path: Path, content: str | bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "run.jsonl").write_bytes(
            content.encode() if isinstance(content, str) else content
        )
    with pytest.raises(DataError, match=words) as error:
        read_run(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such folder; give the folder of a run"):
        read_run(tmp_path / "nowhere")


def test_the_record_in_place_of_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "run", lines()) / "run.jsonl"
    with pytest.raises(DataError, match=rf"is a file; give the folder of the run, {tmp_path}/run$"):
        read_run(file)


def test_files_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    """A folder stands where a file should be: reading it fails, as it does when a run removes a
    checkpoint under our eyes."""
    folder = write(tmp_path / "run", lines())
    for name in (
        "quarantine.jsonl",
        "checkpoints/000000001000/manifest.json",
        "mistakes/mistakes.json",
    ):
        (folder / name).mkdir(parents=True)
    run = read_run(folder)
    assert (run.num_bad, run.checkpoints, run.mistakes) == (0, (), ())
    assert len(run.notes) == 2


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write(tmp_path / parent / "run", lines()) for parent in "ab"]
    assert [run.name for run in read_runs(folders)] == ["run (1)", "run (2)"]


@pytest.mark.parametrize(
    ("entry", "is_shown"),
    [
        ({"file": "0000.png", "label": "a", "predicted": "b"}, True),
        ({"file": "../secret.png", "label": "a", "predicted": "b"}, False),
        ({"file": "linked.png", "label": "a", "predicted": "b"}, False),
        ({"file": "text.png", "label": "a", "predicted": "b"}, False),
        ({"file": "huge.png", "label": "a", "predicted": "b"}, False),
        ({"file": "missing.png", "label": "a", "predicted": "b"}, False),
        ({"label": "a"}, False),
        ("0000.png", False),
    ],
)
def test_only_images_of_the_folder_come_into_the_page(
    tmp_path: Path, entry: Any, is_shown: bool
) -> None:
    folder = write(tmp_path / "run", lines())
    mistakes = folder / "mistakes"
    write_mistakes(mistakes, 1)
    png = (mistakes / "0000.png").read_bytes()
    (folder / "secret.png").write_bytes(png)
    (mistakes / "linked.png").symlink_to(folder / "secret.png")
    (mistakes / "text.png").write_text("a secret that is no image")
    (mistakes / "huge.png").write_bytes(png + bytes(50_000))
    (mistakes / "mistakes.json").write_text(json.dumps([entry]))
    run = read_run(folder)
    assert len(run.mistakes) == is_shown
    assert bool(run.notes) is not is_shown


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [
        *("x" * 5000, "a\0b", "", ".", "..", "../secret.png", "mistakes/0000.png", "folder.png"),
        *("pipe.png", "zero.png", "loop.png", ["0000.png"], {"a": 1}, None, 1e300),
    ],
    ids=lambda name: str(name)[:20].replace("\0", "NUL"),
)
@pytest.mark.parametrize("is_absolute", [False, True], ids=["relative", "absolute"])
def test_one_hostile_entry_is_left_out(tmp_path: Path, name: Any, is_absolute: bool) -> None:
    """The other entry stays, and the page has a note."""
    folder = write(tmp_path / "run", lines(epochs=1))
    mistakes = folder / "mistakes"
    write_mistakes(mistakes, 1)
    (folder / "secret.png").write_bytes((mistakes / "0000.png").read_bytes())
    (mistakes / "folder.png").mkdir()
    os.mkfifo(mistakes / "pipe.png")
    (mistakes / "zero.png").symlink_to("/dev/zero")
    (mistakes / "loop.png").symlink_to("loop.png")
    good = json.loads((mistakes / "mistakes.json").read_text())
    entry = {"file": f"{mistakes}/{name}" if is_absolute else name, "label": "a", "predicted": "b"}
    (mistakes / "mistakes.json").write_text(json.dumps([entry, *good]))
    page = write_report([folder], tmp_path / "page.html", now=BEGAN + 9999).read_text()
    assert page.count("data:image/png") == 1
    assert "mistakes/: 1 of 2 images are missing, not PNG, or over 40,000 bytes" in page


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_image_that_pillow_stumbles_over(tmp_path: Path) -> None:
    """Pillow raises IndexError for a colour profile of no bytes."""
    folder = tmp_path / "mistakes"
    write_mistakes(folder, 1)
    png = (folder / "0000.png").read_bytes()
    (folder / "0000.png").write_bytes(png[:-12] + chunk(b"iCCP", b"") + png[-12:])
    (mistake,) = read_mistakes(folder, [])
    assert mistake.brightness == 1.0


def test_a_image_of_many_pixels_is_not_decoded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """24 images of 10 kB and 81 million pixels would take half a minute."""
    folder = tmp_path / "mistakes"
    write_mistakes(folder, 1)
    made = io.BytesIO()
    Image.new("1", (9000, 9000)).save(made, "PNG")
    (folder / "0000.png").write_bytes(made.getvalue())
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("was decoded"))
    (mistake,) = read_mistakes(folder, [])
    assert (mistake.width, mistake.brightness) == (9000, 1.0)


def sums_of_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the sums that allstep.report.mistakes computes from now on."""
    made: list[int] = []

    def counted(values: Any) -> int:
        made.append(1)
        return sum(values)

    monkeypatch.setattr("allstep.report.mistakes.sum", counted, raising=False)
    return made


def test_a_dense_matrix_is_summed_for_shown_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of a row for each cell took minutes for 2,000 classes."""
    counts = tuple(tuple(1 + (i * 7 + j) % 5 for j in range(100)) for i in range(100))
    confusion = Confusion(tuple(map(str, range(100))), counts)
    cells = [(i, j, counts[i][j]) for i in range(100) for j in range(100) if i != j]
    # The first of equal ones, in the order of the table.
    most = sorted(cells, key=lambda cell: -cell[2])[:10]
    expected = [(str(i), str(j), count, count / sum(counts[i])) for i, j, count in most]
    sums = sums_of_rows(monkeypatch)
    assert confusion.worst(10) == expected
    assert len(sums) == 10


@pytest.mark.parametrize(("num_classes", "num_rows"), [(2001, 1), (1, 2001)])
def test_a_matrix_beyond_the_limit_is_left_out(
    tmp_path: Path,
    num_classes: int,
    num_rows: int,
) -> None:
    folder = write(tmp_path / "run", lines(epochs=1))
    (folder / "mistakes").mkdir()
    content = {"classes": ["a"] * num_classes, "counts": [[1]] * num_rows}
    (folder / "mistakes" / "confusion.json").write_text(json.dumps(content))
    run = read_run(folder)
    assert run.confusion is None
    found = "mistakes/confusion.json: has 2,001 classes, the maximum is 2,000; it was left out"
    assert run.notes == (found,)


def test_a_matrix_of_too_many_bytes_is_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines(epochs=1))
    (folder / "mistakes").mkdir()
    with (folder / "mistakes" / "confusion.json").open("w") as file:
        file.write('{"classes": ["a"], "counts": [[1]]}')
        # White space, which JSON allows: only the size is against it.
        file.write(" " * (32 << 20))
    run = read_run(folder)
    assert run.confusion is None
    assert run.notes == ("mistakes/confusion.json: could not be read (OSError); it was left out",)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"classes": ["a"], "counts": [[1e30]]}',
        json.dumps({"classes": ["a", "b"], "counts": [["9" * 4300, "9" * 4300], [1, 1]]}),
        "[]",
        '{"classes": ["a", "b"], "counts": [[1, 2]]}',
        '{"classes": [], "counts": []}',
        '{"classes": ["a"], "counts": [[-1]]}',
    ],
)
def test_a_matrix_that_does_not_fit_is_left_out(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path / "run", lines())
    (folder / "mistakes").mkdir()
    (folder / "mistakes" / "confusion.json").write_text(content)
    run = read_run(folder)
    assert run.confusion is None
    assert len(run.notes) == 1 and run.notes[0].startswith("mistakes/confusion.json: ")


def test_a_damaged_manifest_is_told(tmp_path: Path) -> None:
    folder = write_rich(tmp_path / "run")
    (folder / "checkpoints" / "000000008000" / "manifest.json").write_text('{"files": ')
    run = read_run(folder)
    assert [checkpoint.name for checkpoint in run.checkpoints] == ["000000001000"]
    assert run.notes == (
        "checkpoints/000000008000: its manifest is damaged; --resume will not use it",
    )


@pytest.mark.parametrize(
    ("highest", "brightness"), [(16, 255 / 16), (63, 255 / 63), (64, 1.0), (255, 1.0), (0, 1.0)]
)
def test_dark_images_are_shown_brighter(tmp_path: Path, highest: int, brightness: float) -> None:
    """The 8x8 digits go from 0 to 16; the file itself stays what the model saw."""
    folder = tmp_path / "mistakes"
    write_mistakes(folder, 1)
    (entry,) = json.loads((folder / "mistakes.json").read_text())
    Image.new("L", (8, 8), highest).save(folder / entry["file"])
    (mistake,) = read_mistakes(folder, [])
    assert mistake.brightness == brightness
