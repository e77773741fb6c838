"""Runs the command line: `python -m allstep` is the command `allstep`."""

from allstep.cli import main

if __name__ == "__main__":
    main()
