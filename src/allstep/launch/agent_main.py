"""The program of an agent with the launcher on its standard streams.

ssh or srun starts it on another host. The launcher starts it on this machine for a host that an
elastic run finds later: it has threads by then, and cannot fork.

A module of its own, since the package imports `agent`: Python warns on standard error when it runs
a module that is already imported, and the launcher would quote that warning.
"""

import os
import sys

from allstep.launch.agent import Agent
from allstep.launch.link import Link
from allstep.launch.messages import TO_AGENT
from allstep.process import stop_signals
from allstep.process.family import keep_exit_codes


def main() -> None:
    """Run the agent of the host that the command line names.

    A second argument is `here` on this machine; elsewhere one more signal to report, if any.
    """
    _, host, *place = sys.argv
    if place and place != ["here"]:
        os.environ[stop_signals.VARIABLE] = place[0]
    to_launcher = os.dup(1)
    # A stray print must not mix with the messages.
    os.dup2(2, 1)
    with keep_exit_codes():
        Agent(Link(0, to_launcher, TO_AGENT), host, remote=place != ["here"]).run()


if __name__ == "__main__":
    main()
