"""Tables: aligned columns as plain text, and tables that rich fits to the terminal."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from allstep.console.rich_table import cell, figure_columns, name_value_table, text_columns
from allstep.console.text_table import columns


def _drawn(drawn: object, width: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(drawn)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_columns_are_aligned_without_trailing_spaces() -> None:
    assert list(columns([["a", "bb", "c"], ["aaa", "b", ""]])) == ["a    bb  c", "aaa  b"]


def test_columns_of_no_rows_and_of_one_cell() -> None:
    assert list(columns([])) == []
    assert list(columns([["a"], [""], ["b c"]])) == ["a", "", "b c"]


def test_a_short_row_ends_where_it_likes() -> None:
    rows = [["a.jpg", "cat 90%", "dog 10%"], ["b.jpg", "cannot be read: no such file"]]
    assert list(columns(rows, gap=3)) == [
        "a.jpg   cat 90%   dog 10%",
        "b.jpg   cannot be read: no such file",
    ]


def test_wide_characters_take_two_places() -> None:
    first, second = columns([["猫", "x"], ["cats", "x"]])
    assert cell_len(first) == cell_len(second)


@pytest.mark.parametrize("text", ["a\x1b[31mb", "[red]a[/red]", "a\x07", "a\nb"])
def test_cells_of_names_and_values_are_neither_markup_nor_control_characters(text: str) -> None:
    whole = "\n".join(_drawn(name_value_table([(text, text)])))
    assert whole.isprintable()
    assert "[red]" in whole or "\\" in whole


def test_a_long_value_is_wrapped_and_not_cut() -> None:
    value = "/folder" * 20
    lines = _drawn(name_value_table([("source", value), ("samples", "5")]))
    assert "".join(line.removeprefix("source ").strip() for line in lines[:-1]) == value
    assert lines[-1].split() == ["samples", "5"]


def test_figures_are_aligned_right_and_names_left() -> None:
    table = figure_columns(["name"], ["ms", "MB"])
    table.add_row("a", "1.5", "10")
    table.add_row("longer", "22.5", "1")
    head, _, first, second = _drawn(table)
    assert head.split() == ["name", "ms", "MB"]
    assert first.index("1.5") + 3 == second.index("22.5") + 4
    assert first.startswith("a ")


def test_text_columns_have_their_heads() -> None:
    table = text_columns("sample", "reason")
    table.add_row("7", cell("cut\noff", keep="\n"))
    assert [line.split() for line in _drawn(table)] == [["sample", "reason"], ["7", "cut"], ["off"]]
