"""The supervisor returns the command's exit status, and no process outlives the runner, the command
or the supervisor."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allstep.process.python import run_bare
from allstep.study.child import Child
from support.fake_trials import SCRIPT, Steps

PYTHON = (sys.executable, "-I", "-S", "-c")


def child(folder: Path, *command: str, lock: str = "lock") -> Child:
    return Child(command, folder / "output", folder / lock, os.environ)


def script(folder: Path, steps: Steps) -> list[str]:
    return [*PYTHON, SCRIPT, str(folder), json.dumps(steps), "[]"]


def appeared(file: Path) -> str:
    """Waits for a file; the test's own time limit is the only one."""
    while not file.exists():
        time.sleep(0.005)
    return file.read_text()


def is_alive(pid: int) -> bool:
    """A zombie is not: only its parent sees it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone(pid: int) -> None:
    while is_alive(pid):
        time.sleep(0.005)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(75)", 75),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_the_exit_status_is_the_command_s(tmp_path: Path, code: str, expected: int) -> None:
    started = child(tmp_path, *PYTHON, code)
    os.waitid(os.P_PIDFD, started.fileno(), os.WEXITED | os.WNOWAIT)
    assert started.exit_code() == expected == started.close()


@pytest.mark.usefixtures("processes")
def test_a_command_that_is_none(tmp_path: Path) -> None:
    started = child(tmp_path, "no-such-program")
    os.waitid(os.P_PIDFD, started.fileno(), os.WEXITED | os.WNOWAIT)
    assert started.close() == 127
    assert "no-such-program: cannot be started" in (tmp_path / "output").read_text()


@pytest.mark.usefixtures("processes")
def test_one_core(tmp_path: Path) -> None:
    started = child(tmp_path, *PYTHON, "import os; print(os.environ['OMP_NUM_THREADS'])")
    os.waitid(os.P_PIDFD, started.fileno(), os.WEXITED | os.WNOWAIT)
    started.close()
    assert (tmp_path / "output").read_text() == "1\n"


@pytest.mark.usefixtures("processes")
def test_letting_go_kills_everything(tmp_path: Path) -> None:
    started = child(tmp_path, *script(tmp_path, [["child", "{run}/pid"], ["wait", "{run}/never"]]))
    pid = int(appeared(tmp_path / "pid"))
    assert is_alive(pid)
    assert started.close() == 128 + signal.SIGKILL
    assert not is_alive(pid)


@pytest.mark.usefixtures("processes")
def test_what_the_command_left_is_killed(tmp_path: Path) -> None:
    started = child(tmp_path, *script(tmp_path, [["child", "{run}/pid"]]))
    os.waitid(os.P_PIDFD, started.fileno(), os.WEXITED | os.WNOWAIT)
    assert started.close() == 0
    assert not is_alive(int(appeared(tmp_path / "pid")))


@pytest.fixture
def held(processes: None, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor of a command with a child."""
    command = script(tmp_path, [["child", "{run}/pid"], ["wait", "{run}/never"]])
    arguments = run_bare("allstep.process.supervisor", str(tmp_path / "lock"), *command)
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()
    for file in tmp_path.glob("pid"):  # with the supervisor killed, no other process ends this one
        if is_alive(int(file.read_text())):
            os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_killed_supervisor_takes_its_command_along(
    tmp_path: Path, held: subprocess.Popen[bytes]
) -> None:
    appeared(tmp_path / "pid")
    (command,) = Path(f"/proc/{held.pid}/task/{held.pid}/children").read_text().split()
    held.kill()
    gone(int(command))


@pytest.mark.usefixtures("processes")
def test_the_next_one_waits_for_the_lock(tmp_path: Path) -> None:
    first = child(tmp_path, *script(tmp_path, [["touch", "{run}/first"], ["wait", "{run}/never"]]))
    appeared(tmp_path / "first")
    second = child(tmp_path, *script(tmp_path, [["touch", "{run}/second"]]))
    third = child(tmp_path, *script(tmp_path, [["touch", "{run}/third"]]))
    assert third.close() == 128 + signal.SIGKILL  # let go while it waited
    assert not (tmp_path / "second").exists()
    first.close()
    appeared(tmp_path / "second")
    os.waitid(os.P_PIDFD, second.fileno(), os.WEXITED | os.WNOWAIT)
    assert second.close() == 0
    assert not (tmp_path / "third").exists()


@pytest.mark.usefixtures("processes")
def test_a_command_has_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    started = child(tmp_path, *PYTHON, "import os; print(os.environ['OMP_NUM_THREADS'])")
    select.select([started], [], [])
    assert started.close() == 0
    assert (tmp_path / "output").read_text() == "1\n"
