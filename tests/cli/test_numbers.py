"""Options that start threads or processes are bounded: one line, before anything starts."""

import pytest
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.errors import UserError


@pytest.mark.parametrize("number", ["0", "-1", "1025", "100000000000000000000"])
@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["train", "digits", "--workers"],
            ["train", "digits", "--dry-run", "-n"],
            ["eval", "run", "--workers"],
        ),
        *(
            ["data", "verify", "x", "--jobs"],
            ["data", "pack", "x", "y", "--jobs"],
            ["study", "batch", "digits", "-j"],
        ),
        *(
            ["study", "updates", "digits", "--jobs"],
            ["data", "show", "digits", "--out", "x.png", "--samples"],
        ),
        *(["bench", "step", "--np"], ["bench", "data", "--threads"]),
    ],
)
def test_an_absurd_number_of_workers_is_one_line(arguments: list[str], number: str) -> None:
    error = CliRunner().invoke(app, [*arguments, number]).exception
    assert isinstance(error, UserError) and error.exit_code == 2, error
    assert f"expected a number from 1 to 1024, found {number}" in str(error)


def test_an_absurd_number_to_verify() -> None:
    error = CliRunner().invoke(app, ["verify", "digits", "--workers", "1,100000"]).exception
    assert isinstance(error, UserError) and "each from 1 to 1024" in str(error)
