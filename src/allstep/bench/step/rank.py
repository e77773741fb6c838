"""One rank of `allstep bench step`: trains on requests of the bench, which arrive over a socket.

    python -m allstep.bench.step.rank MODEL BATCH SOCKET

It is started by `allstep run` and exchanges lines of JSON with the bench::

    rank  -> {"rank": 0, "size": 2, "names": ["independent copies", ...]}
    bench -> {"prepare": "DDP on Gloo"}
    rank  -> {"nbytes": 123, "losses": [...]}             memory that it needs; losses of two steps
    bench -> {"train": "DDP on Gloo", "turn": 3, "steps": 5}
    rank  -> {"seconds": 1.2, "losses": [...]}            from the moment when all ranks are ready
    bench -> {"watch": "DDP on Gloo", "turn": 4, "steps": 5}
    rank  -> {"parts": {"waiting": 0.01, ...}}            seconds per step of communication
    bench -> {"drop": "DDP on Gloo"}                      it failed on a rank
    rank  -> {}

If a contender raises an error, the answer is {"failed": reason}.

A contender is a function that takes the model and its SGD and returns the objects to use instead.
All have the same model with the same weights, and at the same step of the same turn the same images
and the same dropout, so that their losses are equal, except those of ranks that push.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import allstep.comm
from allstep.bench.comm.rank import serve
from allstep.bench.step.pushed import push_gradients
from allstep.bench.step.result import ALONE, DDP, GLOO, OPTIMIZER, PUSHED, SHARED, Task, task_of
from allstep.comm.timeline import recorder
from allstep.models import AlexNet, SmallCnn, resnet18
from allstep.process.memory import written_nbytes

# Timeout for another rank; less than the bench waits for an answer.
_SECONDS_TO_WAIT = 60
# DDP rebuilds its buckets after the first step.
_STEPS_TO_PREPARE = 2

Wrap = Callable[[nn.Module, Optimizer], tuple[Callable[[Tensor], Tensor], Optimizer]]

MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "alexnet": AlexNet,
    "resnet18": lambda: resnet18(10, small_pictures=True),
    "small-cnn": lambda: SmallCnn(10, (1, 28, 28), widths=(32, 64), hidden=250),
}


def _alone(model: nn.Module, sgd: Optimizer) -> tuple[nn.Module, Optimizer]:
    return model, sgd


def _ddp(backend: str) -> Wrap:
    def wrap(model: nn.Module, sgd: Optimizer) -> tuple[nn.Module, Optimizer]:
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=_SECONDS_TO_WAIT))
        return DistributedDataParallel(model, process_group=group), sgd

    return wrap


def _distributed(share_weights: bool) -> Wrap:
    def wrap(model: nn.Module, sgd: Optimizer) -> tuple[nn.Module, Optimizer]:
        import allstep.torch as hvd

        hvd.init()
        return model, hvd.DistributedOptimizer(
            sgd, model.named_parameters(), share_weights=share_weights
        )

    return wrap


CONTENDERS: Mapping[str, Wrap] = {
    ALONE: _alone,
    GLOO: _ddp("gloo"),
    DDP: _ddp("allstep"),
    OPTIMIZER: _distributed(share_weights=False),
    SHARED: _distributed(share_weights=True),
    PUSHED: push_gradients,
}


@dataclass
class Trainee:
    """A copy of the model and the optimizer as a training script would use them."""

    model: Callable[[Tensor], Tensor]
    optimizer: Optimizer

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run one training step and return the loss."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


class StepRank:
    """Executes the requests of the bench on one rank."""

    def __init__(
        self,
        rank: int,
        size: int,
        model: str,
        batch: int,
        contenders: Mapping[str, Wrap] = CONTENDERS,
    ) -> None:
        self.rank, self.size = rank, size
        self.names = list(contenders)
        self._contenders = contenders
        self._model, self._task, self._batch = model, task_of(model), batch
        self._trainees: dict[str, Trainee] = {}
        self._lessons = Lessons(self._task, rank, size, batch)
        # Memory that torch allocates at its first step must not count for a contender.
        self._trainees[ALONE] = self._make(_alone)
        self._train(ALONE, 0, _STEPS_TO_PREPARE)
        self._drop(ALONE)

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
        dist.barrier()
        before = written_nbytes()
        self._trainees[name] = self._make(self._contenders[name])
        losses = [
            self._trainees[name].step(*lesson).item()
            for lesson in self._lessons.of(0, _STEPS_TO_PREPARE)
        ]
        # All ranks have mapped the shared memory.
        dist.barrier()
        nbytes = written_nbytes() - before
        self._trainees[name].optimizer.zero_grad()
        return {"nbytes": nbytes, "losses": losses}

    def _make(self, wrap: Wrap) -> Trainee:
        torch.manual_seed(0)
        model = MODELS[self._model]()
        # With a low learning rate rounding errors grow slowly, and losses can be compared.
        sgd = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=5e-4)
        return Trainee(*wrap(model, sgd))

    def _train(
        self, name: str, turn: int, steps: int, watching: AbstractContextManager[Any] | None = None
    ) -> dict[str, Any]:
        trainee, lessons = self._trainees[name], self._lessons.of(turn, steps)
        dist.barrier()
        with watching or nullcontext():
            started = time.perf_counter()
            losses = [trainee.step(*lesson) for lesson in lessons]
            seconds = time.perf_counter() - started
        # Frees memory for the next contender.
        trainee.optimizer.zero_grad()
        return {"seconds": seconds, "losses": [loss.item() for loss in losses]}

    def _watch(self, name: str, turn: int, steps: int) -> dict[str, Any]:
        parts: dict[str, float] = defaultdict(float)
        self._train(name, turn, steps, watching(parts))
        return {"parts": {part: seconds / steps for part, seconds in parts.items()}}

    def _drop(self, name: str) -> dict[str, Any]:
        self._trainees.pop(name, None)
        return {}


class Lessons:
    """Synthetic images and labels, made before timing; always the same for a rank and turn."""

    def __init__(self, task: Task, rank: int, size: int, batch: int) -> None:
        self._task, self._rank, self._size, self._batch = task, rank, size, batch
        self._made: list[tuple[Tensor, Tensor]] = []
        self._made_for = (-1, -1)

    def of(self, turn: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a batch for each step, after setting the seed of the model's random numbers."""
        if self._made_for != (turn, steps):
            chance = torch.Generator().manual_seed(turn * self._size + self._rank)
            self._made, self._made_for = [self._draw(chance) for _ in range(steps)], (turn, steps)
        return self._seeded(turn)

    def _draw(self, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(self._batch, *self._task.shape, generator=chance)
        return images, torch.randint(self._task.num_classes, (self._batch,), generator=chance)

    def _seeded(self, turn: int) -> Iterator[tuple[Tensor, Tensor]]:
        for step, lesson in enumerate(self._made):
            torch.manual_seed((turn * len(self._made) + step) * self._size + self._rank)
            yield lesson


@contextmanager
def watching(parts: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of collectives, by what they do, and of torch's optimizer steps."""
    marks: list[float] = []

    def begin(*_: Any) -> None:
        marks.append(time.perf_counter())

    def end(*_: Any) -> None:
        parts["updating"] += time.perf_counter() - marks.pop()

    hooks = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
    before, recorder.active = recorder.active, recorder.Recorder()
    try:
        yield
    finally:
        operations, _ = recorder.active.take()
        recorder.active = before
        for hook in hooks:
            hook.remove()
    for operation in operations:
        for kind, began, ended in recorder.spans(operation):
            parts[kind] += (ended - began) / 1e9


def main(model: str, batch: str, path: str) -> None:
    """Serve the bench as one rank, started by `allstep run`."""
    os.environ.setdefault("ALLSTEP_TIMEOUT", str(_SECONDS_TO_WAIT))
    world = allstep.comm.init()
    torch.set_num_threads(1)
    serve(path, StepRank(world.rank, world.size, model, int(batch)))


if __name__ == "__main__":
    main(*sys.argv[1:])
