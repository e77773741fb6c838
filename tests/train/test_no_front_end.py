"""`allstep train` uses `comm` and `parallel`: it starts no engine and imports no front-end."""

import sys
from pathlib import Path

import pytest

from support.allstep_command import run

pytestmark = pytest.mark.usefixtures("processes")

TRAIN = """
import sys, threading
from pathlib import Path
import allstep
from allstep.train import read_config
from allstep.train.run.loop import train

world = allstep.init()
overrides = ["epochs=1", "batch=100", "data.validation=100", "save.seconds=null", "model.norm=sync", *sys.argv[2:]]
seen = set()
class Look:
    def __getattr__(self, name):
        def counted(*args, **named):
            seen.update(thread.name for thread in threading.enumerate())
        return counted
out = Path(sys.argv[1]) / str(world.rank)
out.mkdir()
train(read_config("digits", overrides), world, out, [Look()])
loaded = {"allstep.torch", "allstep.hvd"} & sys.modules.keys()
assert not loaded, loaded
assert "allstep-engine" not in seen, seen
allstep.shutdown()
left = [thread.name for thread in threading.enumerate() if "allstep" in thread.name]
assert not left, left
print("trained", flush=True)
"""


@pytest.mark.parametrize("overrides", [[], ["share_weights=true"]])
@pytest.mark.parametrize("size", [1, 2])
def test_no_engine_and_no_front_end(tmp_path: Path, size: int, overrides: list[str]) -> None:
    (tmp_path / "script.py").write_text(TRAIN)
    done = run(
        "run", "-np", str(size), sys.executable, tmp_path / "script.py", tmp_path, *overrides
    )
    assert done.code == 0, done.err
    assert done.out.count("trained") == size
