"""Print the precision that a run would choose.

    python -m allstep.train.run.settle_precision < config.json

It builds the job of one worker and ends before the first step. Studies use it, because their own
process does not import torch.
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
    """Return name and reason of the precision of `config` on this machine."""
    world = comm.init(NONE)
    with scratch(world) as folder:
        precision = make_job(config.resolved(1), world, folder).trainer.precision
    comm.shutdown()
    return {"name": precision.name, "why": precision.why}


def main() -> None:
    """Read a config from standard input and print the precision as JSON to standard output.

    An error in the config or the data is one line on standard error.
    """
    try:
        print(json.dumps(settle_alone(RunConfig.model_validate_json(sys.stdin.read()))))
    except UserError as error:
        print_notice(str(error))
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
