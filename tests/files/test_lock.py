"""Locks between processes."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from allstep.files.lock import LockTaken, in_turn, locked, try_lock

HOLD = """
import os, sys, time
from pathlib import Path
from allstep.files.lock import locked
with locked(Path(sys.argv[1])) as handle:
    os.pwrite(handle, b"another process", 0)
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.mark.usefixtures("processes")
def test_another_process_waits_or_learns_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockTaken, match="is locked by another process"), locked(path):
            pass
        threading.Timer(0.3, holder.kill).start()
        began = time.monotonic()
        with locked(path, 30):
            assert 0.2 < time.monotonic() - began < 20


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "link"):
        pass
    assert not (tmp_path / "target").exists()
    with pytest.raises(IsADirectoryError), locked(tmp_path):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(number: int) -> None:
        def refuse(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)

    without(errno.EOPNOTSUPP)
    with locked(tmp_path / "lock") as handle:
        assert try_lock(handle)
    without(errno.EIO)
    with pytest.raises(OSError, match="Input/output"), locked(tmp_path / "lock"):
        pass


def test_a_thread_may_enter_twice(tmp_path: Path) -> None:
    with in_turn(tmp_path), in_turn(tmp_path), in_turn(None), in_turn(tmp_path / "nothing"):
        pass
