"""What every Python that a test starts has in common: `support/start_of_python/sitecustomize.py`."""

import subprocess
import sys

import pytest

from conftest import START_OF_PYTHON
from support.ranks import clean_environment

pytestmark = pytest.mark.usefixtures("processes")

# Trains with two optimizers of torch, one of them compiled later, and prints both losses.
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
    assert ("torch._dynamo" in sys.modules) == COMPILER
    assert gc.isenabled()
    import torch._dynamo
    from torch._dynamo.utils import counters
    step = torch.optim.SGD.step
    while hasattr(step, "__wrapped__"):
        if step.__name__ == "step" and step.__code__.co_name == "_use_grad":
            assert step.__code__.co_filename.endswith("torch/optim/optimizer.py")
            break
        step = step.__wrapped__
    else:
        raise AssertionError("no wrapper of step")
    add = torch.optim.Optimizer.add_param_group.__wrapped__
    assert getattr(add, "__dynamo_disable", None) is not add
    print(before, [train(*each, True) for each in makers], counters["frames"]["ok"] > 0)
"""


def test_optimizers_do_not_import_the_compiler_and_compile_as_before() -> None:
    """With it and without it: the same numbers, and the functions of torch when compiled."""
    printed = []
    for has_compiler in (False, True):
        code = TRAIN.replace("COMPILER", str(has_compiler))
        env = clean_environment()
        if has_compiler:
            env["PYTHONPATH"] = env["PYTHONPATH"].replace(START_OF_PYTHON, "")
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1] and printed[0].endswith("True\n")
