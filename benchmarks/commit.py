"""Measure the copy that `TorchState.commit()` makes, next to Horovod's way.

    python benchmarks/commit.py [--repetitions 9] [--json FILE]

The model is AlexNet with 1,000 classes, the optimizer SGD with momentum after one step: 489 MB. The
contenders take turns in one process, on one thread:

- `TorchState.save()`, the copy of a commit into memory that was allocated before;
- `copy.deepcopy` of both state dicts, as Horovod does;
- the bytes alone, copied once from one tensor into another.

The commit of one worker sends nothing; the broadcast of a few bytes that belongs to it is not
measured. Target: at least 4 times as fast as `copy.deepcopy`, in the median.
"""

import argparse
import copy
import time
from collections.abc import Callable

import torch
from rich.console import Console

from allstep.bench.result import Result, Row
from allstep.bench.script import parsed, positive
from allstep.models import AlexNet
from allstep.torch.elastic import TorchState

OURS, HOROVOD, BYTES = "TorchState.save()", "copy.deepcopy of both state dicts", "the bytes once"


def contenders() -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    model = AlexNet(1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    state = TorchState(model, optimizer)
    kept: list[object] = [None]

    def deep() -> None:
        # The old copy exists until the new one is complete, as in Horovod.
        kept[0] = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    count = 2 * sum(parameter.numel() for parameter in model.parameters())
    source, target = torch.ones(count), torch.ones(count)
    return {OURS: state.save, HOROVOD: deep, BYTES: lambda: target.copy_(source)}


def measure(repetitions: int) -> Result:
    acts = contenders()
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(repetitions + 1):
        for name, act in acts.items():
            began = time.perf_counter()
            act()
            # The first turn allocates.
            if turn:
                seconds[name].append(time.perf_counter() - began)
    rows = tuple(Row(name, tuple(times)) for name, times in seconds.items())
    return Result("commit", rows, (), {"deepcopy": HOROVOD, "bytes": BYTES})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=positive, default=9)
    options = parsed(parser)
    torch.set_num_threads(1)
    result = measure(options.repetitions)
    Console().print(result.table())
    if options.json:
        options.json.write_text(result.to_json())
