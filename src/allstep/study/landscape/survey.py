"""The points of one survey, distributed over the workers.

```
round      0        1        2
rank 0     point 0  point 2  point 4        one worker sums a whole point, so its bits do not
rank 1     point 1  point 3  -              depend on the number of workers
           gather   gather   gather         rank 0 saves each point and shows the progress
```

A round waits for its slowest worker: all points have the same work.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from allstep.comm.group import agree
from allstep.data import Batch
from allstep.study.landscape.point_file import Value
from allstep.study.landscape.points import Point
from allstep.study.landscape.weights import Weights
from allstep.train.input.to_input import ToInput
from allstep.train.score.evaluate import tally_alone
from allstep.train.task.task import Task
from allstep.world import World

Save = Callable[[str, Value], None]


@dataclass(frozen=True)
class Loss:
    """The function that is drawn: the loss on fixed samples, of weights at a point."""

    weights: Weights
    batches: Sequence[Batch]
    to_input: ToInput
    task: Task
    flip: bool

    def __call__(self, point: Point) -> Value:
        """Return loss and accuracy at `point`, as `allstep eval` computes them."""
        self.weights.place(point)
        model = self.weights.model
        score = tally_alone(model, self.batches, self.to_input, self.task, flip=self.flip).score()
        return Value.of(score.loss, score.accuracy)


def evaluate_points(
    world: World, todo: Sequence[Point], loss: Callable[[Point], Value], save: Save
) -> dict[str, Value]:
    """Return the values at all points of `todo` on each rank. A collective.

    Rank 0 calls `save` with each as soon as it is computed; its UserError ends all ranks.
    """
    found: dict[str, Value] = {}
    for begin in range(0, len(todo), world.size):
        some = todo[begin : begin + world.size]
        mine = loss(some[world.rank]) if world.rank < len(some) else None
        values = agree.gather(world, mine)
        computed = {
            point.name: value
            for point, value in zip(some, values, strict=False)
            if value is not None
        }
        agree.rank_0_decides(world, partial(_save_all, computed, save))
        found |= computed
    return found


def _save_all(values: Mapping[str, Value], save: Save) -> None:
    for name, value in values.items():
        save(name, value)


def seconds_per_point(world: World, loss: Loss) -> tuple[float, bool]:
    """Return the seconds of a point on the slowest rank, and whether all ranks computed one loss.

    The first evaluation includes the set-up of kernels and is not counted. A collective.
    """
    center = Point("center", "first")
    loss(center)
    began = time.perf_counter()
    value = loss(center)
    timed = agree.gather(world, (time.perf_counter() - began, value))
    return max(seconds for seconds, _ in timed), len({value for _, value in timed}) == 1
