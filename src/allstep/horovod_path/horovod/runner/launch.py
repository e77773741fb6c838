"""`python -m horovod.runner.launch`: horovodrun."""

import sys

from allstep.cli import main


def run_commandline() -> None:
    """Run `allstep run --as-horovodrun` with the arguments of this command."""
    sys.argv[1:1] = ["run", "--as-horovodrun"]
    main()


if __name__ == "__main__":
    run_commandline()
