"""The command `allstep`, whose workers write the samples of each step (`counted_samples`).

    python counted_train.py train digits --workers 3 --min-workers 1 ...

COUNTED_SAMPLES in the environment is the folder of their files, COUNTED_PAUSE the seconds that each
step takes longer.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))


def main() -> None:
    from allstep import cli
    from allstep.cli import train
    from allstep.wire.keys import TICKET
    from support.counted_samples import write_samples

    # The launcher starts its workers with this file, too.
    train.run_module = lambda _, *arguments: [sys.executable, __file__, *arguments]
    if TICKET in os.environ:
        folder = Path(os.environ["COUNTED_SAMPLES"])
        write_samples(folder, float(os.environ.get("COUNTED_PAUSE", "0")))
    cli.main()


if __name__ == "__main__":
    main()
