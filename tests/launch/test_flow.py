"""Workers that end while the launcher takes no output: nothing is lost, and the others continue."""

import time
from pathlib import Path

import pytest

from support.allstep_command import start
from support.ranks import wait_until

pytestmark = pytest.mark.usefixtures("processes")

LINES = 400_000

# Rank 0 prints 12 MB, and states in a file how far it is. Rank 1 ends when it is asked to.
SCRIPT = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    for number in range({lines}):
        os.write(1, b"%029d\\n" % number)
        if number % 1000 == 0:
            (folder / "progress").write_text(str(number))
    (folder / "done").touch()
else:
    while not (folder / "go").exists():
        time.sleep(0.01)
    print("the last line of rank 1")
    sys.exit({code})
"""


def until_blocked(progress: Path) -> None:
    """Return when rank 0 has printed nothing for a while: pipes and buffers up to the terminal are
    full."""
    seen, since = "", time.monotonic()
    while time.monotonic() - since < 1.5:
        now = progress.read_text() if progress.exists() else ""
        if now != seen or not now:
            seen, since = now, time.monotonic()
        time.sleep(0.05)


@pytest.mark.parametrize("code", [0, 7])
def test_a_worker_that_ends_while_output_waits(tmp_path: Path, code: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(lines=LINES, code=code))
    process = start("run", "-np", "2", tmp_path / "script.py", tmp_path)
    try:
        until_blocked(tmp_path / "progress")
        assert not (tmp_path / "done").exists()
        (tmp_path / "go").touch()
        time.sleep(0.5)
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "[1] the last line of rank 1" in out.splitlines()
    assert "Traceback" not in err
    if code:
        assert "rank 1" in err and "7" in err
    else:
        assert out.count("\n") == LINES + 1
        assert (tmp_path / "done").exists()


def test_a_child_that_floods_the_pipe_of_a_worker_that_is_gone(tmp_path: Path) -> None:
    """What the pipe holds at the worker's end is read, and no more is waited for."""
    command = f"yes > /dev/stdout & echo $! > {tmp_path}/pid; exit 0"
    process = start("run", "-np", "1", "sh", "-c", command)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
