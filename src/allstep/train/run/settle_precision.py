"""`python -m allstep.train.run.settle_precision < config.json` prints the precision that a run
would choose.

It makes the job of one worker and ends before the first step. A study uses it, whose own process
has no torch.
"""

import json
import sys

from allstep import comm
from allstep.console.escape import print_notice
from allstep.errors import UserError
from allstep.train.config.run_config import RunConfig
from allstep.train.folder.scratch import scratch
from allstep.train.run.setup import make_job
from allstep.world import NONE


def settle_alone(config: RunConfig) -> dict[str, str]:
    """Name and reason of the precision that `config` gets on this machine."""
    world = comm.init(NONE)
    with scratch(world) as folder:
        precision = make_job(config.resolved(1), world, folder).trainer.precision
    comm.shutdown()
    return {"name": precision.name, "why": precision.why}


def main() -> None:
    """From standard input to standard output; a user's mistake is one line on standard error."""
    try:
        print(json.dumps(settle_alone(RunConfig.model_validate_json(sys.stdin.read()))))
    except UserError as error:
        print_notice(str(error))
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
