"""Alive, ending or gone: real processes, and tasks whose flags are written by hand, since no real
process stays in its end."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allstep.process import liveness
from allstep.process.liveness import Life, flags_of, life_of
from support.ranks import wait_until

LIVING, EXITING = 0x400040, 0x400044
CAN_END_EARLY = (
    "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start();"
)


@pytest.fixture
def sleeper(processes: None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def stat(flags: int, name: str = "python") -> str:
    return f"7 ({name}) S 1 7 7 0 -1 {flags} 1909 0 0 0 2 1 0 0 20 0 1 0 100\n"


class Tasks:
    """A folder like /proc/<pid>, for a process that lives: what `Life` reads of its tasks."""

    def __init__(self, folder: Path, life: Life) -> None:
        self.folder, self.main = folder / "task", life.pid
        os.close(life._folder)
        life._folder = os.open(folder, os.O_RDONLY)

    def set(self, flags: dict[int, int]) -> None:
        for tid, value in flags.items():
            (self.folder / str(tid)).mkdir(parents=True, exist_ok=True)
            (self.folder / str(tid) / "stat").write_text(stat(value))


@pytest.mark.parametrize("name", ["python", "a b", ") S 1 (", "((", ""])
def test_flags_after_any_name(name: str) -> None:
    assert flags_of(stat(EXITING, name).encode()) == EXITING


def test_the_flags_of_this_process() -> None:
    assert not flags_of(Path("/proc/self/stat").read_bytes()) & 4


def test_a_process_lives_until_it_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    life = life_of(sleeper.pid)
    assert life.shows_tasks and not life.is_ending() and not life.has_ended()
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert not life.is_ending()
    sleeper.kill()
    wait_until(life.has_ended)
    assert life.is_ending()  # also while it waits to be reaped
    sleeper.wait()
    assert life.is_ending() and life.has_ended()


def test_all_tasks_must_be_exiting(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    life = Life(sleeper.pid)
    tasks, main = Tasks(tmp_path, life), sleeper.pid
    for flags, is_ending in [
        ({main: LIVING, 11: LIVING}, False),
        ({main: LIVING, 11: EXITING}, False),
        ({main: EXITING, 11: LIVING}, False),
        ({main: EXITING, 11: EXITING}, True),
    ]:
        tasks.set(flags)
        assert life.is_ending() is is_ending, flags
    assert not life.has_ended()


def test_a_task_that_vanishes_has_exited(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    life = Life(sleeper.pid)
    tasks = Tasks(tmp_path, life)
    tasks.set({sleeper.pid: EXITING, 11: LIVING})
    (tmp_path / "task" / "11" / "stat").unlink()
    assert life.is_ending()


def test_a_task_that_starts_another_before_it_exits(
    sleeper: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(sleeper.pid)
    tasks, read = Tasks(tmp_path, life), liveness._is_exiting
    tasks.set({sleeper.pid: EXITING, 11: EXITING})

    def is_exiting(path: str, folder: int) -> bool:
        tasks.set({12: LIVING})
        return read(path, folder)

    monkeypatch.setattr(liveness, "_is_exiting", is_exiting)
    assert not life.is_ending()


def stat_with(status: int) -> str:
    fields = ["7", "(a b) c)", "S", *map(str, range(4, 52)), str(status)]
    return " ".join(fields) + "\n"


def test_the_exit_code_of_a_process_that_is_ending(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """The kernel shows a status before it frees the memory; 0 may mean that it does not show it."""
    life = Life(sleeper.pid)
    assert life.ending_code() is None
    tasks = Tasks(tmp_path, life)
    for flags, status, code in [
        (LIVING, signal.SIGKILL, None),
        (EXITING, signal.SIGKILL, -signal.SIGKILL),
        (EXITING, 3 << 8, 3),
        (EXITING, 0, None),
    ]:
        tasks.set({sleeper.pid: flags})
        (tmp_path / "stat").write_text(stat_with(status))
        assert life.ending_code() == code
    (tmp_path / "stat").unlink()
    assert life.ending_code() is None


@pytest.mark.usefixtures("processes")
def test_a_main_thread_that_ends_before_the_others() -> None:
    """The kernel shows such a process as a zombie; it lives."""
    script = CAN_END_EARLY + "print(flush=True); ctypes.CDLL(None).pthread_exit(None)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=-1)
    try:
        process.stdout.readline()
        main = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
        wait_until(lambda: flags_of(main.read_bytes()) & 4, what="the end of the main thread")
        life = life_of(process.pid)
        assert life.shows_tasks and not life.is_ending()
        process.kill()
        wait_until(life.is_ending)
    finally:
        process.kill()
        process.communicate()


def test_where_proc_shows_nothing(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_folder_of", lambda pid: None)
    life = Life(sleeper.pid)
    assert not life.shows_tasks and not life.is_ending()
    sleeper.kill()
    wait_until(life.is_ending)


def test_a_folder_that_may_not_be_read(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    life = Life(sleeper.pid)
    tasks = Tasks(tmp_path, life)
    tasks.set({sleeper.pid: EXITING})
    (tmp_path / "task" / str(sleeper.pid) / "stat").unlink()
    (tmp_path / "task" / str(sleeper.pid) / "stat").mkdir()  # an error of reading, for root too
    assert not life.is_ending()


def test_one_life_for_all_that_watch_it(sleeper: subprocess.Popen[bytes]) -> None:
    life = life_of(sleeper.pid)
    gc.collect()  # files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    assert life_of(sleeper.pid) is life and len(os.listdir("/proc/self/fd")) == before
    sleeper.kill()
    wait_until(life.has_ended)
    later = life_of(sleeper.pid)  # another process may have the number by now
    assert later is not life
    del life, later
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_several_threads_may_ask_at_once(sleeper: subprocess.Popen[bytes]) -> None:
    life, wrong = life_of(sleeper.pid), []

    def ask() -> None:
        try:
            wrong.extend(["ending"] for _ in range(3000) if life.is_ending())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_such_process(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(ProcessLookupError):
        life_of(sleeper.pid)


@pytest.mark.usefixtures("processes")
def test_a_large_process_is_ending_long_before_it_is_gone() -> None:
    """Freeing 600 MB takes a tenth of a second or more; a busy machine gets more
    rounds."""
    script = (
        "import time; memory = bytearray(b'x') * (600 << 20); print(flush=True); time.sleep(600)"
    )
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=-1)
        process.stdout.readline()
        life = life_of(process.pid)
        process.kill()
        while not life.is_ending():
            time.sleep(0.001)
        early = not life.has_ended()
        process.communicate()
        assert life.has_ended()
        if early:
            return
    pytest.fail("never seen ending before it was gone")


def test_many_threads_cost_no_more(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living process is judged by its main thread alone."""
    reads = []
    monkeypatch.setattr(liveness, "flags_of", lambda text: reads.append(text) or flags_of(text))
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(50)]
    for thread in threads:
        thread.start()
    try:
        life = Life(os.getpid())
        reads.clear()
        assert not life.is_ending() and len(reads) == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
