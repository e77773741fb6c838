"""A program of an elastic run that counts steps and does to itself what a test has planned.

    python elastic_steps.py FOLDER STEPS PLAN

PLAN is JSON: what a worker does before a step, by its number and the step, such as
`{"1": {"3": "kill"}}`. Each member prints, at its end, one line of JSON behind "result": its
number, the number of ranks at each step, the generations, and the seconds of each recovery. Workers
that are started later find their number in no plan; the members do not wait for them.

=============  =============================================================================
act            what the worker does
=============  =============================================================================
kill           SIGKILL
stop           SIGSTOP, for good
stop:S         SIGSTOP for S seconds
die forming    SIGKILL while the next world is formed
announce       writes the file `reached`
sleep          waits, for a test that ends the run
=============  =============================================================================
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

kept = ExitStack()  # faults that stay


def main() -> None:
    import torch
    import torch.distributed as dist

    from allstep import comm
    from allstep.comm.group.init import report_updates
    from allstep.errors import CommError

    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    number = os.environ["ALLSTEP_TICKET"].partition("-")[0]
    plan = json.loads(sys.argv[3]).get(number, {})
    world = comm.init()
    step, sizes, generations, gaps = 0, [], [world.generation], []
    while step < num_steps:
        try:
            (folder / f"alive {number}").write_text(str(time.monotonic()))
            act(plan.pop(str(step), ""), folder)
            total = torch.ones(1)
            dist.all_reduce(total)
            sizes.append(int(total))
            step += 1
            report_updates(step)
            time.sleep(0.01)
        except CommError:
            began = time.monotonic()
            world = comm.rejoin(step)
            (folder / f"joined {world.generation}").write_text(str(time.monotonic()))
            gaps.append(time.monotonic() - began)
            generations.append(world.generation)
    print("result", json.dumps([int(number), sizes, generations, gaps]), flush=True)
    comm.shutdown()


def act(what: str, folder: Path) -> None:
    """Do what the plan has for this step."""
    kind, _, seconds = what.partition(":")
    if kind == "stop":
        if seconds:
            wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "die forming":
        from allstep import faults

        kept.enter_context(faults.inject("kill@during=forming"))
    elif kind == "announce":
        (folder / "reached").touch()
    elif kind == "sleep":
        (folder / "reached").touch()
        time.sleep(600)


if __name__ == "__main__":
    main()
