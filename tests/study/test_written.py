"""Files that a study writes into a folder which may hold anything."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from allstep.errors import ConfigError
from allstep.study.axes import save_figure
from allstep.study.folder import write_whole


def test_a_link_in_the_place_of_a_file_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in ("study.png", "table.md", "table.md.new"):
        (tmp_path / name).symlink_to(precious)
    write_whole(tmp_path / "table.md", "| a |\n")
    save_figure(Figure(), tmp_path / "study.png")
    assert precious.read_text() == "precious"
    assert (tmp_path / "table.md").read_text() == "| a |\n"
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_in_the_place_of_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "table.md" / "inside").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"table\.md: cannot be written: .*irectory.*; remove"
    ) as caught:
        write_whole(tmp_path / "table.md", "text")
    assert "\n" not in str(caught.value)
