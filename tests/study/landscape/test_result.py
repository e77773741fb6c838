"""The result files: what is written is read again, and what is damaged is left out of a report."""

import json
import re
from pathlib import Path

import pytest

from allstep.report.landscape import views
from allstep.report.landscape.draw import Scale
from allstep.report.page import write_report
from allstep.report.run import read_run
from allstep.study.landscape.point_file import Value
from allstep.study.landscape.points import Grid, points
from allstep.study.landscape.result import (
    Around,
    Line,
    around_result,
    line_result,
    read_around,
    read_line,
    write_result,
)
from allstep.study.landscape.summary import around_rows, line_rows
from support.damaged_json import RAW, odd
from support.synthetic_runs import lines, write


def around(grid: Grid, run: str = "small") -> Around:
    """A bowl: the loss is 0.1 + |steps|^2, each direction of the flatness figure a bit steeper."""
    values = {
        each.name: Value(
            0.1 + sum((1 + number / 10) * length**2 for number, length in each.steps), 0.9
        )
        for each in points("around", grid)
    }
    return around_result({"seed": 0}, run, "the model has none", grid, values)


def line(first: Around) -> Line:
    """A barrier half way; the second run is steeper by 0.2."""
    values = {"second": Value(0.3, 0.8)}
    values |= {f"second flat {k}": Value(0.75 + k / 40, 0.5) for k in range(10)}
    values |= {f"line {i}": Value(1.0 - abs(i - 2) / 4, 0.5) for i in (1, 2, 3)}
    return line_result({"seed": 0}, ("small", "large"), "interpolated", 5, values, first)


@pytest.mark.parametrize("grid", [(3, 5), (5, 5), (4, 4), (7,)])
def test_what_is_written_is_read_again(tmp_path: Path, grid: Grid) -> None:
    (tmp_path / "landscape").mkdir()
    assert read_around(tmp_path) is None and read_line(tmp_path) is None
    first = around(grid)
    write_result(tmp_path, first)
    write_result(tmp_path, line(first))
    assert read_around(tmp_path) == first
    assert read_line(tmp_path) == line(first)


def test_the_table_has_the_first_direction_in_rows() -> None:
    found = around((3, 5)).plain()
    assert found["loss"][1][2] == 0.1, "the center, which has no point of its own"
    assert found["loss"][0][2] == pytest.approx(1.1)
    assert found["loss"][1][0] == pytest.approx(1.2)
    assert found["flatness"]["rises"][:2] == pytest.approx([0.25, 0.275])
    assert found["flatness"]["mean"] == pytest.approx(0.3625)


def test_the_figures_in_words() -> None:
    first = around((3, 5))
    rows = dict(around_rows(first)) | dict(line_rows(line(first)))
    assert rows["center"] == "loss 0.1000, accuracy 90.00%"
    assert rows["points"] == "3x5, from -1 to 1 norms of the filters: loss 0.1 to 2.2"
    assert rows["flatness"].startswith("the loss rises by 0.3625 ± 0.07569 at 0.5 of the filters'")
    assert rows["line between them"] == (
        "loss 1 at 50% of the way: a barrier of 0.7 above the higher end"
    )
    assert rows["on the same directions"] == (
        "large rises by 0.2 ± 1.462e-17 more than small, in 10 of 10 directions"
    ) or rows["on the same directions"].startswith("large rises by 0.2 ± ")


def test_losses_that_are_not_finite_are_named() -> None:
    values = {each.name: Value(0.5, 0.5) for each in points("around", (3,))}
    values["flat 3"] = values["plane 0"] = Value(None, 0.1)
    found = around_result({}, "run", "none", (3,), values)
    rows = dict(around_rows(found))
    assert rows["points"].endswith("not finite at 1 points")
    assert "not finite at 0.5 of the filters' norm in 1 of 10 directions" in rows["flatness"]
    assert json.loads(json.dumps(found.plain()))["loss"] == [None, 0.5, 0.5]


def test_a_report_shows_contour_surface_and_line(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, lines()) for name in ("small", "large")]
    for folder in folders:
        (folder / "landscape").mkdir()
        write_result(folder, around((9, 9), folder.name))
    write_result(folders[0], line(around((9, 9))))
    folders.append(write(tmp_path / "bare", lines()))
    page = write_report(folders, tmp_path / "page.html").read_text()
    found = re.findall(r'<img src="data:image/png[^>]*alt="([^"]*)', page)
    assert [each.split()[0] for each in found] == [
        *("Contours", "The", "Loss", "Rise"),
        *("Contours", "The"),
    ]
    assert "Loss around the weights" in page and "a barrier of 0.7" in page
    assert len(page) < 700_000


def test_one_direction_is_a_curve(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines())
    (folder / "landscape").mkdir()
    write_result(folder, around((9,)))
    found = views([read_run(folder)])[0]
    assert found is not None and len(found.images) == 1


def test_damaged_results_are_left_out_with_a_note(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines())
    (folder / "landscape").mkdir()
    first = around((3, 3))
    for name, plain in (("around", first.plain()), ("line", line(first).plain())):
        file = folder / "landscape" / f"{name}.json"
        texts = [
            *RAW,
            "",
            "[]",
            '{"version": 2}',
            *(odd(plain, i) for i in range(60)),
        ]
        for text in texts:
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
            found = read_run(folder)
            shown = found.landscape if name == "around" else found.line
            assert shown is not None or any(
                note.startswith(f"landscape/{name}.json: ") for note in found.notes
            ), text
        file.unlink()


def test_any_number_can_be_drawn(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines())
    plain = around((3, 3)).plain() | {"loss": [[1e300, -5, 0], [None, 1e-320, 3], [1, 2, 1e30]]}
    (folder / "landscape").mkdir()
    (folder / "landscape" / "around.json").write_text(json.dumps(plain))
    (found,) = views([read_run(folder)])
    assert found is not None and len(found.images) == 2
    assert len(Scale.of([1e300, -5, None]).levels()) <= 30
    assert Scale.of([0.02, 30.0]).levels() == [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20]
    few = Scale.of([1.1, 1.3]).levels()
    assert len(few) == 9 and 1.1 < few[0] < few[-1] < 1.3
    assert Scale.of([None]).levels() == [0.2, 0.5, 1, 2, 5]
    same = Scale.of([2.0, 2.0])
    assert same.low < min(same.levels()) <= max(same.levels()) < same.high


def test_huge_grids_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allstep.study.landscape.result.MAX_POINTS", 100)
    (tmp_path / "landscape").mkdir()
    plain = around((3,)).plain() | {"loss": [0.1] * 101}
    (tmp_path / "landscape" / "around.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="of the same points"):
        read_around(tmp_path)
