"""One rank of `allstep bench step --framework`: trains on requests of the bench.

    python -m allstep.bench.step.frameworks.rank FRAMEWORK MODEL BATCH SOCKET

The requests and answers are those of `allstep.bench.step.rank`, with "cpu" next to "seconds": CPU
time of the whole process, all threads. `allstep run` starts the ranks, so each has one thread for
the framework, as any worker on as many cores as workers.
"""

import importlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, islice
from typing import Any

# Timeout for another rank, which may still compile.
_SECONDS_TO_WAIT = 300
# Frameworks trace and compile in the first steps.
_STEPS_TO_PREPARE = 3
_MODULES = {"tensorflow": "tensorflow_trainees", "mxnet": "mxnet_trainees"}


class FrameworkRank:
    """Executes the requests of the bench on one rank."""

    def __init__(
        self,
        place: tuple[int, int],
        contenders: Mapping[str, Callable[[], Any]],
        batches: Any,
        meet: Callable[[], Any],
        watching: Callable[[dict[str, float]], AbstractContextManager[Any]],
    ) -> None:
        self.rank, self.size = place
        self.names = list(contenders)
        self._contenders, self._batches = contenders, batches
        self._meet, self._watching = meet, watching
        self._trainees: dict[str, Any] = {}

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer."""
        (verb, name), *rest = order.items()
        act: Callable[..., dict[str, Any]] = getattr(self, f"_{verb}")
        try:
            return act(name, **dict(rest))
        except Exception as error:
            reason = [*str(error).strip().splitlines(), "no reason given"][0]
            return {"failed": f"{type(error).__name__}: {reason}"}

    def _prepare(self, name: str) -> dict[str, Any]:
        from allstep.process.memory import written_nbytes

        self._meet()
        before = written_nbytes()
        self._trainees[name] = self._contenders[name]()
        losses = self._train(name, 0, _STEPS_TO_PREPARE)["losses"]
        return {"nbytes": written_nbytes() - before, "losses": losses}

    def _train(
        self, name: str, turn: int, steps: int, watching: AbstractContextManager[Any] | None = None
    ) -> dict[str, Any]:
        trainee = self._trainees[name]
        trainee.start()
        self._meet()
        with watching or nullcontext():
            started, cpu = time.perf_counter(), time.process_time()
            losses = [trainee.step(*each) for each in islice(cycle(self._batches), steps)]
            trainee.finish()
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        return {"seconds": seconds, "cpu": cpu, "losses": [_number(loss) for loss in losses]}

    def _watch(self, name: str, turn: int, steps: int) -> dict[str, Any]:
        parts: dict[str, float] = defaultdict(float)
        self._train(name, turn, steps, self._watching(parts))
        return {"parts": {part: seconds / steps for part, seconds in parts.items()}}

    def _drop(self, name: str) -> dict[str, Any]:
        self._trainees.pop(name, None)
        return {}


def _number(loss: Any) -> float:
    """Return the loss of a framework as a number."""
    return float(loss.asscalar() if hasattr(loss, "asscalar") else loss)


def main(framework: str, model: str, batch: str, path: str) -> None:
    """Serve the bench as one rank, started by `allstep run`."""
    os.environ.setdefault("ALLSTEP_TIMEOUT", str(_SECONDS_TO_WAIT))
    from allstep.bench.step.frameworks.tasks import framework_of, task_of

    # Keras reads it when it is imported.
    os.environ["KERAS_BACKEND"] = framework_of(framework).backend
    import torch.distributed as dist

    import allstep.comm
    from allstep.bench.comm.rank import serve
    from allstep.bench.step.frameworks.trainee import make_batches
    from allstep.bench.step.frameworks.watching import watching

    world = allstep.comm.init()
    module = f"allstep.bench.step.frameworks.{_MODULES.get(framework, 'keras_trainees')}"
    contenders = importlib.import_module(module).contenders(model, world.rank, world.size)
    batches = make_batches(task_of(framework, model), int(batch), world.rank)
    place = world.rank, world.size
    serve(path, FrameworkRank(place, contenders, batches, dist.barrier, watching(framework)))


if __name__ == "__main__":
    main(*sys.argv[1:])
