"""Where lines are written: full disks, slow readers and closed pipes never end a run."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from allstep.launch.output.sink import Sink, without_blocking
from support.allstep_command import ALLSTEP, run
from support.ranks import clean_environment, wait_until


class Clock:
    """Seconds that pass when a test sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def test_a_full_disk_is_reported_once_and_writing_resumes_when_there_is_room(
    tmp_path: Path,
) -> None:
    reports: list[str] = []
    clock = Clock()
    sink = Sink(full(), "the log", reports.append, clock)
    for _ in range(3):
        sink.write(b"lost\nlost\n")
        clock.now += 0.2
    assert len(reports) == 1
    assert "cannot write the log: No space left on device" in reports[0]
    path = tmp_path / "log"
    real = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(real, sink.fd)
    os.close(real)
    sink.write(b"too soon\n")
    assert path.read_bytes() == b""
    clock.now += 1.0
    sink.write(b"kept\n")
    sink.close()
    gap = "allstep run: 7 lines are missing here: No space left on device"
    assert path.read_text().splitlines() == [gap, "kept"]
    assert len(reports) == 1


@pytest.mark.usefixtures("processes")
def test_a_disk_that_fills_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """RLIMIT_FSIZE cuts the write as a full disk does; after it a line of its own reports what is
    missing."""
    script = f"""
import os, resource, signal
from allstep.launch.output.sink import Sink
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
now = [0.0]
log = os.open({str(tmp_path / "log")!r}, os.O_WRONLY | os.O_CREAT)
sink = Sink(log, "log", print, lambda: now[0])
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
sink.write(b"first\\nsecond\\nthird\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
now[0] = 2.0
sink.write(b"fourth\\n")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    gap = "allstep run: 2 lines are missing here: File too large"
    assert (tmp_path / "log").read_text().splitlines() == ["first", "seco", gap, "fourth"]


def test_a_gap_after_a_part_of_a_line_starts_a_line(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "log"
    sink = Sink(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "the log", lambda line: None, clock
    )
    sink.write(b" 10%\r")
    real, disk = os.dup(sink.fd), full()
    os.dup2(disk, sink.fd)
    sink.write(b" 20%\rdone\n")
    os.dup2(real, sink.fd)
    clock.now += 2.0
    sink.write(b"kept\n")
    sink.close()
    for fd in (real, disk):
        os.close(fd)
    gap = b"allstep run: 1 lines are missing here: No space left on device"
    assert path.read_bytes() == b" 10%\r\n" + gap + b"\nkept\n"


def test_a_reader_that_is_gone_is_not_reported() -> None:
    reports: list[str] = []
    reading, writing = os.pipe()
    os.close(reading)
    sink = Sink(writing, "standard output", reports.append)
    sink.write(b"line\n")
    sink.write(b"line\n")
    sink.close()
    assert reports == []


def test_closed_standard_output_is_not_an_error() -> None:
    Sink(-1, "standard output", lambda line: None).write(b"line\n")


def test_a_slow_reader_gets_every_byte_of_a_non_blocking_pipe() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    data = b"".join(b"line %06d\n" % number for number in range(50_000))
    received: list[bytes] = []

    def read() -> None:
        while block := os.read(reading, 3000):
            received.append(block)

    reader = threading.Thread(target=read)
    reader.start()
    sink = Sink(writing, "standard output", lambda line: None)
    for start in range(0, len(data), 120_000):
        sink.write(data[start : start + 120_000])
    sink.close()
    reader.join(60)
    os.close(reading)
    assert b"".join(received) == data


PRINT = ["--", sys.executable, "-c", "for i in range(20000): print('x' * 80)"]


@pytest.mark.usefixtures("processes")
def test_a_run_whose_standard_output_is_on_a_full_disk_continues(tmp_path: Path) -> None:
    worker = f"print('hello'); open({str(tmp_path / 'done')!r}, 'w').close()"
    command = [*ALLSTEP, "run", "-np", "1", "--", sys.executable, "-c", worker]
    with Path("/dev/full").open("wb") as disk:
        done = subprocess.run(
            command,
            stdout=disk,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
            timeout=100,
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot write standard output: No space left on device") == 1
    assert "Traceback" not in done.stderr
    assert (tmp_path / "done").exists()


@pytest.mark.usefixtures("processes")
def test_a_run_whose_log_folder_is_full_continues(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    worker = [sys.executable, "-c", "import os; print('I am', os.environ['RANK'])"]
    done = run("run", "-np", "2", "--log-dir", tmp_path, "--", *worker)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["[0] I am 0", "[1] I am 1"]
    assert done.err.count("rank-0.log: No space left on device") == 1
    assert (tmp_path / "rank-1.log").read_text() == "I am 1\n"


@pytest.mark.usefixtures("processes")
def test_a_run_with_a_non_blocking_standard_output_loses_no_line() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = subprocess.Popen(
        [*ALLSTEP, "run", "-np", "1", *PRINT],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    )
    os.close(writing)
    size = 0
    while block := os.read(reading, 1 << 16):
        size += len(block)
        time.sleep(0.001)
    os.close(reading)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert size == 20_000 * len("[0] " + "x" * 80 + "\n")


@pytest.mark.usefixtures("processes")
def test_a_run_under_nohup_survives_the_hangup(tmp_path: Path) -> None:
    """`nohup` starts a command with SIGHUP ignored; at logout the terminal's processes get that
    signal."""
    started, go = tmp_path / "started", tmp_path / "go"
    worker = f"""
import pathlib, time
pathlib.Path({str(started)!r}).touch()
while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)
print("survived")
"""
    process = subprocess.Popen(
        ["nohup", *ALLSTEP, "run", "-np", "1", "--", sys.executable, "-c", worker],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    )
    end = time.monotonic() + 60
    while not started.exists() and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGHUP)
    time.sleep(0.3)
    go.touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "[0] survived\n"), err


def test_a_writer_that_must_end_drops_what_is_not_read() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    asked: list[int] = []

    def wait(fd: int) -> bool:
        asked.append(fd)
        return len(asked) < 3

    sink = Sink(writing, "standard output", lambda line: None, wait=wait)
    sink.write(bytes(1 << 20))
    sink.write(b"dropped\n")
    assert asked == [writing] * 3
    sink.close()
    os.close(reading)


def test_a_pipe_and_a_terminal_are_written_without_blocking() -> None:
    """And keep their own mode, which other processes share."""
    reading, writing = os.pipe()
    main, terminal = pty.openpty()
    for fd in (writing, terminal):
        ours = without_blocking(fd)
        assert ours != fd and not os.get_blocking(ours) and os.get_blocking(fd)
        os.close(ours)
    assert without_blocking(-1) == -1
    for fd in (reading, writing, main, terminal):
        os.close(fd)


TALKS = (
    'if [ $RANK = 0 ]; then exec yes; fi; trap "touch saved; exit 0" TERM; touch up; while :; do'
    " sleep 0.05; done"
)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("how", ["term", "two ctrl-c"])
def test_signals_reach_the_workers_while_no_reader_reads(tmp_path: Path, how: str) -> None:
    """`| less` on a page, a hung `tee`: workers save all the same, and the run ends."""
    quick = (
        "from allstep import cli; from allstep.launch import run_state; run_state._GIVE_UP_SECONDS"
        " = 1.0; cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", quick, "run", "-np", "2", "--grace", "2", "sh", "-c", TALKS],
        stdout=subprocess.PIPE,
        env=clean_environment(),
        cwd=tmp_path,
        start_new_session=True,
    )
    assert process.stdout is not None
    wait_until((tmp_path / "up").exists)
    wait_until(lambda: is_full(process.stdout))
    if how == "term":
        process.terminate()
        wait_until((tmp_path / "saved").exists)
    else:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    assert process.wait(40) == (143 if how == "term" else 130)
    process.stdout.close()


def is_full(pipe: object) -> bool:
    """Whether no more fits into a pipe, seen from the side that reads."""
    count = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))  # type: ignore[call-overload]
    return int.from_bytes(count, sys.byteorder) > 60_000


@pytest.mark.usefixtures("processes")
def test_a_pipe_without_a_reader_as_a_log_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.log")
    done = run("run", "-np", "1", "--log-dir", tmp_path, "true")
    assert done.code == 2 and "rank-0.log" in done.err


@pytest.mark.usefixtures("processes")
def test_a_folder_that_was_removed(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m allstep run -np 1 true"
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, env=clean_environment(), timeout=60
    )
    assert done.returncode != 0
    assert (
        done.stderr
        == "allstep: the current folder does not exist any more; change to another one (cd) and"
        " start again\n"
    )
