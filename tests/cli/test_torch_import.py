"""A command that trains imports torch with its optimizers, and no collection looks at them."""

import gc
import subprocess
import sys

import pytest

from allstep.cli.torch_import import import_torch
from support.ranks import clean_environment

FOUND = """if True:
    import gc, sys
    from allstep.cli.torch_import import import_torch
    before = gc.get_freeze_count()
    import_torch(optimizers=True)
    assert "torch._dynamo" in sys.modules and gc.isenabled()
    print(before, gc.get_freeze_count())
"""


@pytest.mark.usefixtures("processes")
def test_torch_and_its_optimizers_are_frozen() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FOUND],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    before, after = map(int, done.stdout.split() or pytest.fail(done.stderr))
    assert before == 0 and after > 100_000


def test_a_process_that_has_torch_stays_as_it_is() -> None:
    import torch  # noqa: F401

    before = gc.get_freeze_count()
    import_torch(optimizers=True)
    assert gc.get_freeze_count() == before
