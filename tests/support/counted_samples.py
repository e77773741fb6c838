"""Count the samples of an elastic run one by one.

Each worker writes a line before each step that it computes: the generation of its world, the
position and size of the global batch, and the samples of its own share. `counted_steps` reads the
lines of all workers. A step that failed is repeated in a later generation at the same position, so
the lines of the last generation are those of the step that counted.
"""

import itertools
import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from support.elastic_training import EPOCH, Link, changes


def write_samples(folder: Path, pause: float = 0.0) -> None:
    """Let this worker write the lines into a file in `folder`, from now on.

    pause: seconds of sleep in each step, for a run that is to last while workers start.
    """
    from allstep.comm.join.membership import membership
    from allstep.train.run.rounds import each_step

    original = each_step.reduce_step
    # One write for each line: a worker that is killed leaves none that is incomplete.
    file = os.open(folder / f"{os.getpid()}.samples", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def written(trainer: Any, batch: Any, num_samples: int, clock: Any) -> Any:
        time.sleep(pause)
        member = membership()
        assert member is not None and member.place is not None
        line = [member.place.generation, batch.position, num_samples, batch.samples.tolist()]
        os.write(file, json.dumps(line).encode() + b"\n")
        return original(trainer, batch, num_samples, clock)

    each_step.reduce_step = written


class CountedStep(NamedTuple):
    """A step that counted: its position, the generation and size of its world, its samples."""

    position: int
    generation: int
    size: int
    samples: list[int]


def counted_steps(folder: Path, last: int) -> list[CountedStep]:
    """Return all steps before the position `last`, in order.

    Fails if a step is missing, or if the shares of its workers are not its whole batch.
    """
    shares: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for file in folder.glob("*.samples"):
        for line in file.read_text().splitlines():
            generation, position, num_samples, share = json.loads(line)
            shares[position][generation].append((num_samples, share))
    steps, position = [], 0
    while position < last:
        assert shares[position], f"no step begins at {position} samples"
        generation, counted = max(shares[position].items())
        batch = [sample for _, share in counted for sample in share]
        assert {num for num, _ in counted} == {len(batch)}, (position, shares[position])
        steps.append(CountedStep(position, generation, len(counted), batch))
        position += len(batch)
    assert position == last
    return steps


def assert_each_counts_once(steps: list[CountedStep]) -> None:
    """Each sample was trained once in each epoch that is complete, at most once in the last one."""
    samples = [sample for step in steps for sample in step.samples]
    epochs = [Counter(samples[start : start + EPOCH]) for start in range(0, len(samples), EPOCH)]
    for number, epoch in enumerate(epochs):
        assert set(epoch.values()) == {1}, f"epoch {number}: {epoch.most_common(3)}"
        assert number == len(epochs) - 1 or epoch == epochs[0]


def links_of(steps: list[CountedStep], run: Path) -> list[Link]:
    """Return the parts of the reference of a run that was stopped after these steps.

    A rank 0 that dies after a step may have recorded neither the step nor the change of the world
    before it; the steps show the change nevertheless.
    """
    due = {event["position"]: event["due"] for event in changes(run)}
    parts = []
    for step, after in itertools.pairwise(steps):
        if after.generation != step.generation:
            parts.append(Link(step.size, after.position, due.get(after.position, False)))
    end = steps[-1].position + len(steps[-1].samples)
    return [*parts, Link(steps[-1].size, end, False)]
