"""What the scripts in `benchmarks/` share as commands: checked options, and workers that run the
same file."""

import argparse
import os
import sys
from pathlib import Path

from allstep.process.python import run_module


def positive(text: str) -> int:
    """A whole number of 1 or more, as an option gives it."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with `--json FILE`, whose folder must be there before anything is measured."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    return options


def run_as_workers(count: int) -> None:
    """In the command: becomes a launcher of `count` workers, of one thread each, that run this
    command. In a worker: nothing."""
    if "ALLSTEP_RANK" not in os.environ:
        run = run_module("allstep", "run", "-np", str(count), "--show", "0")
        os.execve(
            sys.executable,
            [*run, sys.executable, *sys.argv],
            {**os.environ, "OMP_NUM_THREADS": "1"},
        )
