"""`allstep report`: write one HTML page about a run, or a comparison of several runs."""

from pathlib import Path
from typing import Annotated

import typer

from allstep.cli.output_file import check_output
from allstep.console.escape import print_line

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Run folders; the others are compared with the first."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE.html",
        help="Page to write (default: report.html in the first run folder).",
    ),
]


def report(runs: Runs, out: Out = None) -> None:
    """Write an HTML page with the curves of runs and what they mean.

    The page is one file that loads nothing else.
    """
    from allstep.report import write_report

    check_output("--out", out, "HTML")
    print_line(str(write_report(runs, out)))
