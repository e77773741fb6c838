"""Programs of one launch, one after the other and at once."""

import sys
from pathlib import Path

import pytest

from allstep.comm.join.attendance import differing_programs
from support.allstep_command import Done, run

PROGRAM = """
import sys, time, torch, allstep, torch.distributed as dist
import allstep.torch as hvd
world = allstep.init()
hvd.init()
tag = float(sys.argv[1])
value = torch.tensor([tag])
dist.all_reduce(value)
assert value.item() == 2 * tag, value
assert hvd.allreduce(torch.tensor([tag]), op=hvd.Sum).item() == 2 * tag
print("tag", sys.argv[1], "right", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    return f"{sys.executable} {tmp_path / 'program.py'}"


def launched(script: str) -> Done:
    return run("run", "-np", "2", "sh", "-c", script)


@pytest.mark.usefixtures("processes")
def test_one_program_after_the_other(program: str) -> None:
    """The second must not meet the cards of the first."""
    done = launched(f"{program} 1 0 && {program} 2 0")
    assert done.code == 0, done.err
    assert [done.out.count(f"tag {tag} right") for tag in (1, 2)] == [2, 2]


@pytest.mark.usefixtures("processes")
def test_a_process_that_has_left_makes_room(tmp_path: Path) -> None:
    """It may start another one in its place."""
    (tmp_path / "driver.py").write_text(
        "import subprocess, sys,"
        " allstep\nallstep.init()\nallstep.shutdown()\nsys.exit(subprocess.run([sys.executable,"
        " '-c', 'import allstep; print(allstep.init().size)']).returncode)\n"
    )
    done = run("run", "-np", "2", sys.executable, tmp_path / "driver.py")
    assert done.code == 0, done.err
    assert done.out.count("] 2") == 2


@pytest.mark.usefixtures("processes")
def test_two_programs_at_once_are_refused(program: str) -> None:
    done = launched(f"{program} 1 20 & sleep 4; {program} 1 0; code=$?; kill %1; exit $code")
    assert done.code == 1
    assert "has joined already, as process" in done.err
    assert done.out.count("tag 1 right") == 2


@pytest.mark.usefixtures("processes")
def test_ranks_of_different_programs_are_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("import allstep\nallstep.init()\n")
    done = launched(
        f"if [ $RANK = 0 ]; then exec {sys.executable} {tmp_path}/a.py; fi; exec {sys.executable}"
        f" {tmp_path}/b.py"
    )
    assert done.code == 0
    assert "a.py`, rank 1 `" in done.err


def test_a_rank_may_name_itself() -> None:
    assert (
        differing_programs(["t.py --rank 0", "t.py --rank 1", "t.py --rank 10"], [0, 1, 10]) is None
    )
    assert differing_programs(["t.py --local_rank=0 0", "t.py --local_rank=0 1"], [0, 0]) is None
    assert "rank 1 `u.py`" in str(differing_programs(["t.py", "u.py"], [0, 1]))
    assert differing_programs(["t.py --lr 0.1", "t.py --lr 0.01"], [0, 1])
    assert differing_programs(["t.py 0", "t.py"], [0, 1])
