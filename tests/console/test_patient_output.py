"""Commands whose standard output does not block, and whose reader is slow."""

import fcntl
import os
import subprocess
import sys
import time

import pytest

F_SETPIPE_SZ = 1031


def printed(command: list[str], blocking: bool) -> tuple[int, bytes, bytes]:
    """Return the status and both outputs of a command that writes into a small pipe."""
    read, write = os.pipe()
    fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
    os.set_blocking(write, blocking)
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE) as process:
        os.close(write)
        output = b""
        while data := os.read(read, 1000):
            output += data
            time.sleep(0.01)
        os.close(read)
        assert process.stderr is not None
        return process.wait(60), output, process.stderr.read()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_nothing_is_lost_where_writing_does_not_block(unbuffered: list[str]) -> None:
    command = [sys.executable, *unbuffered, "-m", "allstep", "study", "batch", "--help"]
    expected = printed(command, blocking=True)
    assert expected[0] == 0 and len(expected[1]) > 4096
    assert printed(command, blocking=False) == expected


@pytest.mark.usefixtures("processes")
def test_a_reader_that_leaves_is_no_traceback() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.close(read)
    command = [sys.executable, "-m", "allstep", "study", "batch", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert b"Traceback" not in done.stderr
