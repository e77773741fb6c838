"""`allstep report`: one HTML page about a run, or about several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from allstep.cli.output_file import check_output
from allstep.console.escape import print_line


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders; the others are held beside the first."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE.html", help="Else report.html in the first run's folder."
        ),
    ] = None,
) -> None:
    """Draw what runs did and say what it means: one page, nothing to install or to fetch."""
    from allstep.report import write_report

    check_output("--out", out, "HTML")
    print_line(str(write_report(runs, out)))
