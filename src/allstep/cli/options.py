"""Command-line options that several verbs share, as named types for their signatures."""

from pathlib import Path
from typing import Annotated

import typer

Launcher = Annotated[
    str | None,
    typer.Option("--launcher", help="Launcher to trust for rank and size (default: detect)."),
]
Iface = Annotated[
    str | None, typer.Option(help="Network interface between the hosts (default: by route).")
]
Ssh = Annotated[str, typer.Option(envvar="ALLSTEP_SSH", help="ssh command for other hosts.")]
Faults = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="KIND[:VALUE]@WHERE",
        help="Inject a fault: kill@rank=1,step=50. Repeatable; see docs/faults.md.",
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data", help="Folder with the dataset's files (default: the usual places)."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Execute the model code that a run folder's config names; short for trust=true.",
    ),
]
