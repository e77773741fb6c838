"""The figures of a benchmark: ratios, who is missing, and the three ways out."""

import io
import json
from pathlib import Path

from rich.console import Console

from allstep.bench import Missing, Result, Row

RESULT = Result(
    "launch",
    (Row("torchrun, env://", (3.0, 2.0, 7.0)), Row("allstep run", (1.5, 1.0, 2.5))),
    (Missing("mpirun", "mpirun is not installed"),),
    {"torchrun": "torchrun, env://", "import": "import torch"},
)


def test_ratios_are_those_of_medians() -> None:
    assert RESULT.ratio(RESULT.rows[1], "torchrun") == 0.5
    assert RESULT.ratio(RESULT.rows[1], "import") is None  # it was not measured


def test_the_table_is_for_people() -> None:
    screen = io.StringIO()
    Console(width=80, file=screen).print(RESULT.table())
    lines = [line.split() for line in screen.getvalue().splitlines() if "allstep" in line]
    assert lines == [["allstep", "run", "1.50", "1.00", "2.50", "0.50", "-"]]
    assert RESULT.absences() == ["missing: mpirun (mpirun is not installed)"]


def test_json_holds_every_figure() -> None:
    document = json.loads(RESULT.to_json())
    assert document["rows"][1] == {
        "name": "allstep run",
        "seconds": [1.5, 1.0, 2.5],
        "median": 1.5,
        "min": 1.0,
        "max": 2.5,
        "ratio": {"torchrun": 0.5, "import": None},
    }
    assert document["missing"] == [{"name": "mpirun", "reason": "mpirun is not installed"}]
    assert document["machine"]["cores"] >= 1


def test_the_image(tmp_path: Path) -> None:
    file = tmp_path / "launch.png"
    RESULT.plot(file)
    assert file.read_bytes().startswith(b"\x89PNG")
