"""`allstep plan`: predict the speed of training on many workers."""

from pathlib import Path
from typing import Annotated

import typer

from allstep.cli.output_file import STDOUT, check_output, write_text
from allstep.console.escape import print_line
from allstep.errors import ConfigError

Published = Annotated[
    bool,
    typer.Option(
        "--published",
        help="Predict published measurements and print the error of each prediction.",
    ),
]
Series = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]",
        help="With --published: series of your own runs, as YAML, instead of the published ones.",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Also write the figures as JSON; - is standard output."
    ),
]


def plan(file: Series = None, published: Published = False, json: Json = None) -> None:
    """Show how well the speed on many workers can be predicted.

    The errors are those of published measurements, or of your own series of runs.
    """
    if not published:
        raise ConfigError(
            "allstep plan: predictions for a recipe do not exist yet; expected --published, which"
            " compares predictions with published measurements, or --published FILE"
        )
    from allstep.plan.published_report import as_json, as_text
    from allstep.plan.published_runs import published_runs
    from allstep.plan.published_table import points_of
    from allstep.plan.read_series import read_series

    check_output("--json", json, "JSON")
    points = points_of(published_runs() if file is None else read_series(file))
    if str(json) != STDOUT:
        for line in as_text(points).splitlines():
            print_line(line)
    write_text("--json", json, as_json(points))
