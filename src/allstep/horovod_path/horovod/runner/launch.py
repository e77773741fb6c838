"""`python -m horovod.runner.launch`: horovodrun."""

import sys

from allstep.cli import main


def run_commandline() -> None:
    """`allstep run --as-horovodrun` with our arguments."""
    sys.argv[1:1] = ["run", "--as-horovodrun"]
    main()


if __name__ == "__main__":
    run_commandline()
