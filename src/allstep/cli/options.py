"""Command-line options that several verbs share, as named types for their signatures."""

import os
from pathlib import Path
from typing import Annotated

import typer

from allstep.cli.numbers import MOST, between
from allstep.process import stop_signals

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
MaxFailures = Annotated[
    int | None,
    typer.Option(
        "--max-failures",
        metavar="N",
        callback=between("--max-failures", 1, MOST),
        help=(
            "In an elastic run: give up a worker's slot after N failures without a finished step in"
            " between (default: 3)."
        ),
    ),
]
StopSignal = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="One more signal that means save and exit with 75 (always: TERM, USR1).",
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


def use_stop_signal(given: str | None) -> None:
    """Export the signal of --stop-signal to workers and agents; ConfigError for a wrong one."""
    if given is not None:
        os.environ[stop_signals.VARIABLE] = str(stop_signals.parse(given))
    stop_signals.stop_signals(os.environ)
