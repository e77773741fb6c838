"""Processes that belong together: descendants are found, and none outlives its family."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allstep.process.family import descendants

pytestmark = pytest.mark.usefixtures("processes")

MB = 1 << 20
GRANDCHILD = (
    "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time;"
    " time.sleep(60)'], start_new_session=True).pid, flush=True); time.sleep(60)"
)


def test_descendants_are_found_across_sessions() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GRANDCHILD], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        found = descendants(os.getpid())
        for pid in (grandchild, child.pid):
            os.kill(pid, signal.SIGKILL)
    assert {child.pid, grandchild} <= set(found)
    assert grandchild not in descendants(1 << 22)


def test_a_child_dies_with_its_parent() -> None:
    parent = (
        "import subprocess, sys; from allstep.process.family import die_with_parent;"
        " print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " preexec_fn=die_with_parent).pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, timeout=60, check=True
    )
    pid, end = int(done.stdout), time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


GROW = """
import os
from allstep.process.memory import proportional_nbytes, resident_nbytes, written_nbytes
def measured(): return resident_nbytes(), proportional_nbytes([os.getpid()]), written_nbytes()
before, block, after = measured(), bytearray(os.urandom(64 << 20)), measured()
print(*(new - old for old, new in zip(before, after)), proportional_nbytes([1 << 22]))
"""


def test_memory_grows_with_what_is_written() -> None:
    """In a process of its own: one that has freed memory before takes that again."""
    done = subprocess.run(
        [sys.executable, "-c", GROW], capture_output=True, text=True, timeout=60, check=True
    )
    *grown, without_parent = map(int, done.stdout.split())
    assert all(60 * MB < each < 140 * MB for each in grown), grown
    assert without_parent == 0
