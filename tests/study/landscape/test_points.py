"""The points of a landscape, and the refusal of too many."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import ConfigError
from allstep.study.landscape.allowed import check_allowed, expected_seconds
from allstep.study.landscape.point_file import PointWriter, Value, point_file, read_points
from allstep.study.landscape.points import (
    DISTANCE,
    NUM_DIRECTIONS,
    coordinate,
    coordinates,
    num_points,
    parse_points,
    points,
)

SIDES = st.integers(3, 12)
GRIDS = st.one_of(st.tuples(SIDES), st.tuples(SIDES, SIDES))


def test_the_grid_is_what_the_user_writes() -> None:
    assert parse_points("25x25") == (25, 25)
    assert parse_points("51") == (51,)


@pytest.mark.parametrize(
    "text", ["", "x", "25x", "25x25x25", "2x25", "1", "-5x5", "25 x 25", "٢٥", "1e3", "9" * 10]
)
def test_other_grids_are_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--points: expected .*found"):
        parse_points(text)


@given(SIDES)
def test_places_are_symmetric_with_an_exact_middle_and_exact_ends(count: int) -> None:
    found = coordinates(count)
    assert (found[0], found[-1]) == (-1, 1)
    assert found == [-each for each in reversed(found)]
    assert (0 in found) == (count % 2 == 1)


@given(GRIDS)
def test_the_count_is_that_of_the_list_and_names_are_unique(grid: tuple[int, ...]) -> None:
    for kind in ("around", "line"):
        listed = list(points(kind, grid))
        assert len(listed) == len({each.name for each in listed}) == num_points(kind, grid)


def test_points_of_a_run_are_its_center_the_directions_and_the_grid() -> None:
    listed = {each.name: each for each in points("around", (3, 5))}
    assert listed["center"].steps == ()
    assert [listed[f"flat {k}"].steps for k in range(NUM_DIRECTIONS)] == [
        ((k, DISTANCE),) for k in range(NUM_DIRECTIONS)
    ]
    assert listed["plane 0 1"].steps == ((0, -1.0), (1, -0.5))
    assert "plane 1 2" not in listed, "the center is not evaluated twice"
    assert [each.part for each in points("line", (5, 5)) if each.base == "line"] == [
        0.25,
        0.5,
        0.75,
    ]


def test_billions_of_points_are_counted_without_listing_them() -> None:
    assert num_points("around", (10**9 - 1, 10**9 - 1)) == (10**9 - 1) ** 2 + 10
    assert coordinate(0, 10**9) == -1


def test_too_much_time_and_too_much_space_are_refused_with_the_time() -> None:
    expected = expected_seconds(90_000, 0.15, 2)
    assert expected == pytest.approx(6750)
    with pytest.raises(
        ConfigError,
        match=r"^--points 300x300: 90,000 evaluations take about 1 h 52 min with 2 workers, more than the 60 min",
    ):
        check_allowed((300, 300), 90_000, expected, 2, 3600.0, 10**12)
    check_allowed((300, 300), 90_000, expected, 2, 7000.0, 10**12)
    with pytest.raises(
        ConfigError, match=r"about 1 h 52 min .* 18 MB of disk space, of which 1 MB"
    ):
        check_allowed((300, 300), 90_000, expected, 2, 7000.0, 10**6)


def test_the_slowest_worker_has_the_last_point() -> None:
    assert expected_seconds(7, 1.0, 3) == 3.0


def test_saved_points_are_read_again_without_what_a_kill_left(tmp_path: Path) -> None:
    file = tmp_path / "landscape" / "points"
    writer = PointWriter(file)
    writer.add("center", Value.of(0.125, 0.5))
    writer.add("plane 0 0", Value.of(float("nan"), 0.25))
    writer.close()
    whole = file.read_bytes()
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        again = PointWriter(file)
        again.add("flat 3", Value.of(2.0, 0.0))
        again.close()
        found = read_points(file)
        assert found.pop("flat 3") == Value(2.0, 0.0)
        left = {"center": Value(0.125, 0.5), "plane 0 0": Value(None, 0.25)}
        assert found == dict(list(left.items())[: whole[:cut].count(b"}")])


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        "1",
        '{"point": 3, "loss": 1, "accuracy": 1}',
        '{"point": "x", "loss": true, "accuracy": 1}',
        '{"point": "x", "loss": NaN, "accuracy": 1}',
        "\x00",
    ],
)
def test_lines_that_are_no_points_are_dropped(tmp_path: Path, line: str) -> None:
    (tmp_path / "points").write_text(f"{line}\n")
    assert read_points(tmp_path / "points") == {}


def test_points_of_other_settings_are_in_another_file(tmp_path: Path) -> None:
    one, two = ({"seed": seed, "weights": "a"} for seed in (0, 1))
    assert point_file(tmp_path, "around", one) != point_file(tmp_path, "around", two)
    assert point_file(tmp_path, "around", one) == point_file(
        tmp_path, "around", {"weights": "a", "seed": 0}
    )


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "landscape").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written"):
        PointWriter(tmp_path / "landscape" / "points")
