"""Helpers for the scripts in `benchmarks/`: checked options, and workers that run the same file."""

import argparse
import os
import sys
from pathlib import Path

from allstep.process.python import run_module


def positive(text: str) -> int:
    """Return `text` as a whole number of 1 or more; the type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options and `--json FILE`, whose folder must exist before measuring starts."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args()
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    return options


def run_as_workers(count: int) -> None:
    """Replace this process with a launcher of `count` workers that run the same command.

    Each worker has one thread. In a worker, this is a no-op.
    """
    if "ALLSTEP_RANK" not in os.environ:
        run = run_module("allstep", "run", "-np", str(count), "--show", "0")
        os.execve(
            sys.executable,
            [*run, sys.executable, *sys.argv],
            {**os.environ, "OMP_NUM_THREADS": "1"},
        )
