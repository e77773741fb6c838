"""What every Python that a test starts has in common: `support/start_of_python/sitecustomize.py`."""

import subprocess
import sys

import pytest

from support.ranks import clean_environment

pytestmark = pytest.mark.usefixtures("processes")

# Trains with two optimizers of torch before the compiler is imported and after, and compiles one.
TRAIN = """if True:
    import gc, sys
    import torch

    def train(kind, options, compiled):
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        optimizer = kind(model.parameters(), **options)
        step = optimizer.step
        if compiled:
            step = torch.compile(step, backend="eager")
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(3)).square().sum()
            loss.backward()
            assert torch.is_grad_enabled()
            step()
        optimizer.load_state_dict(optimizer.state_dict())
        return loss.item()

    makers = [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.1})]
    before = [train(*each, False) for each in makers]
    assert "torch._dynamo" not in sys.modules and gc.isenabled()

    import torch._dynamo
    from torch._dynamo.utils import counters

    add = torch.optim.Optimizer.add_param_group.__wrapped__
    assert not hasattr(add, "__dynamo_disable")
    step = torch.optim.SGD.step
    while step.__code__.co_name != "_use_grad":
        step = step.__wrapped__
    assert step.__code__.co_filename.endswith("torch/optim/optimizer.py")
    assert [train(*each, False) for each in makers] == before
    assert train(*makers[0], True) == before[0] and counters["frames"]["ok"] > 0
    assert getattr(add, "__dynamo_disable") is not add
"""


def test_optimizers_do_not_import_the_compiler_and_compile_as_before() -> None:
    """Without it and with it: the same numbers; with it, the functions are torch's own."""
    command = [sys.executable, "-c", TRAIN]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
