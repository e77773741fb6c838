"""Trials that train nothing: a small script writes the record that it is told to, so that tests of
studies take milliseconds.

What a trial does is a list of steps:

    ["line", {...}]        a line of the record ["wait", FILE]         until there is such a file
    ["touch", FILE] ["say", TEXT]          on standard output ["child", FILE]        starts a
    process in a session of its own that never ends, and writes its number to FILE ["exit", CODE]

"{run}" in a file's name is the run folder. With `--resume` (the word that trials add) the trial
does `resumed` instead.

As a program (`python support/fake_trials.py FOLDER TRIALS.json`) it runs a study of such trials, for tests
that kill it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from allstep.study import Study, StudyFolder, Trial, run
from allstep.study.study import grid
from allstep.study.trial import FOLDER

SCRIPT = """
import json, os, pathlib, subprocess, sys, time
run, steps, resumed, *more = sys.argv[1:]
os.makedirs(run, exist_ok=True)
for do, what in json.loads(resumed if more else steps):
    if isinstance(what, str):
        what = what.replace("{run}", run)
    if do == "line":
        with open(os.path.join(run, "run.jsonl"), "a") as file:
            file.write(json.dumps(what) + chr(10))
    elif do == "wait":
        while not os.path.exists(what):
            time.sleep(0.005)
    elif do == "touch":
        pathlib.Path(what).touch()
    elif do == "say":
        print(what, flush=True)
    elif do == "child":
        forever = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
        child = subprocess.Popen(forever, start_new_session=True)
        pathlib.Path(what + ".new").write_text(str(child.pid))
        os.replace(what + ".new", what)
    elif do == "exit":
        sys.exit(what)
"""

Steps = list[list[Any]]

END: Steps = [["line", {"kind": "end", "time": 100.0}]]


def fake(name: str, steps: Steps, resumed: Steps | None = None, **fields: Any) -> Trial:
    """A trial that does `steps`; `resumed`: instead, when it goes on.

    Without these it cannot go on.
    """
    command = (
        sys.executable,
        "-I",
        "-S",
        "-c",
        SCRIPT,
        FOLDER,
        json.dumps(steps),
        json.dumps(resumed or []),
    )
    return Trial(name, command, resume=("--resume",) if resumed is not None else (), **fields)


def lines(
    accuracies: list[float],
    train: int = 1000,
    test: float | None = None,
    seconds: float = 2.0,
    first: int = 0,
) -> Steps:
    """The record of a run with one evaluation an epoch; with `test` it ends.

    `first`: epochs that were there before.
    """
    time, samples = 10.0 + 3 * first, first * train
    found: Steps = [
        ["line", {"kind": "start", "time": time, "data": {"train": train}, "config": {}}]
    ]
    for epoch, accuracy in enumerate(accuracies, start=first + 1):
        samples, time = epoch * train, 10.0 + 3 * epoch
        found.append(
            [
                "line",
                {"kind": "step", "time": time, "samples": samples, "loss": 1.0, "seconds": seconds},
            ]
        )
        scores = {"part": "validation", "samples": samples, "accuracy": accuracy, "loss": 1.0}
        found.append(["line", {"kind": "eval", "time": time, **scores}])
    if test is not None:
        # what no study may take for validation or test: the training sample, better than both
        found.append(
            [
                "line",
                {
                    "kind": "eval",
                    "time": time,
                    "part": "train",
                    "samples": samples,
                    "accuracy": 0.999,
                },
            ]
        )
        found.append(
            ["line", {"kind": "eval", "time": time, "part": "test", "accuracy": test, "loss": 1.0}]
        )
        found.append(["line", {"kind": "end", "time": time}])
    return found


def fake_study(trials: dict[str, tuple[Steps, Steps | None]]) -> Study:
    """The grid of these."""
    return grid([fake(name, *steps) for name, steps in trials.items()], {"names": sorted(trials)})


if __name__ == "__main__":
    folder, file = map(Path, sys.argv[1:])
    run(fake_study(json.loads(file.read_text())), StudyFolder(folder), lanes=2)
