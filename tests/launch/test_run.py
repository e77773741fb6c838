"""`allstep run` on one host: output, failures, signals, and that nothing is left."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.allstep_command import ALLSTEP, processes_with, run, start
from support.ranks import clean_environment, shared_memory_files, wait_until

pytestmark = pytest.mark.usefixtures("processes")

SH = ["sh", "-c"]

FAILING = """
import os, signal, sys, time
import allstep, torch, torch.distributed as dist
world = allstep.init()
for step in range(1000):
    dist.all_reduce(torch.ones(10))
    if world.rank == 1 and step == 5:
        {deed}
    time.sleep(0.01)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("deed", "code", "cause"),
    [
        (
            "raise ValueError('the reason')",
            1,
            ["exit code 1", "ValueError: the reason", "Traceback"],
        ),
        ("sys.exit(3)", 3, ["exit code 3"]),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, ["killed by signal 9 (SIGKILL)"]),
        (
            "import ctypes; ctypes.string_at(0)",
            139,
            ["killed by signal 11 (SIGSEGV)", "Fatal Python error: Segmentation fault"],
        ),
    ],
    ids=["raises", "exits", "killed", "crashes"],
)
def test_the_rank_that_failed_first_is_named_last(
    tmp_path: Path, deed: str, code: int, cause: list[str]
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(deed=deed))
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    done = run("run", "-np", "3", script, env={"RUN_MARK": mark})
    assert done.code == code
    assert done.last_lines.startswith("allstep run: rank 1 on localhost failed first of 3: "), (
        done.err
    )
    for text in cause:
        assert text in done.last_lines
    assert "Connection closed by peer" not in done.last_lines
    # Promised are 5 s after the failure; the start of the launcher is in what we measure, and a
    # machine may pause.
    moment = float(done.last_lines.partition(" s after the start")[0].rpartition(", ")[2])
    assert done.seconds - moment < 20
    assert not processes_with(f"RUN_MARK={mark}")
    wait_until(lambda: not shared_memory_files(), what="an empty /dev/shm")


def test_plain_torch_scripts_run_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nt ="
        " torch.ones(1); dist.all_reduce(t)\nprint(t.item(), os.environ['LOCAL_RANK'],"
        " os.environ['LOCAL_WORLD_SIZE'], torch.get_num_threads())\ndist.destroy_process_group()\n"
    )
    done = run("run", "-np", "2", script)
    assert done.code == 0, done.err
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(done.out.splitlines()) == [f"[0] 2.0 0 2 {share}", f"[1] 2.0 1 2 {share}"]


def test_the_users_threads_count(tmp_path: Path) -> None:
    done = run("run", "-np", "1", *SH, "echo $OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "7"})
    assert done.out == "[0] 7\n"


def test_lines_come_out_whole_and_in_order() -> None:
    text = "for i in $(seq 300); do printf 'a%s-' $i; printf 'b%s-' $i; echo c$i; done"
    done = run("run", "-np", "3", *SH, text)
    for rank in range(3):
        mine = [line for line in done.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] a{i}-b{i}-c{i}" for i in range(1, 301)]
    assert len(done.out.splitlines()) == 900


def test_output_is_never_lost_at_the_end() -> None:
    done = run(
        "run", "-np", "2", sys.executable, "-c", "print('x' * 3_000_000); print('end', end='')"
    )
    assert done.code == 0
    assert done.out.count("x") == 6_000_000
    assert sorted(line for line in done.out.splitlines() if "end" in line) == ["[0] end", "[1] end"]


def test_bytes_that_are_not_text_pass_through(tmp_path: Path) -> None:
    """The log has what the worker wrote; the terminal, of redraws, the last."""
    done = subprocess.run(
        [
            *ALLSTEP,
            "run",
            "-np",
            "1",
            "--log-dir",
            tmp_path,
            *SH,
            r"printf 'caf\351 \303\251\r\n 1%%\r 2%%'",
        ],
        capture_output=True,
        env=clean_environment(),
        timeout=90,
    )
    assert done.stdout == b"[0] caf\xe9 \xc3\xa9\n[0]  2%\n"
    assert (tmp_path / "rank-0.log").read_bytes() == b"caf\xe9 \xc3\xa9\r\n 1%\r 2%"


def test_the_failure_report_escapes_what_it_quotes(tmp_path: Path) -> None:
    """Lines of workers are not escaped, as a progress bar needs it; the report is our own text."""
    hostile = tmp_path / "fails.py"
    hostile.write_text("import sys; sys.exit('gone: \\x1b[2J\\u202e\\x9b\\tfile')")
    done = run("run", "-np", "1", "python", hostile)
    passed_on, _, report = done.err.partition("allstep run: ")
    assert "\x1b[2J\u202e\x9b\tfile" in passed_on
    assert r"  gone: \x1b[2J\u202e\x9b" + "\tfile" in report.splitlines()


def test_streams_stay_apart_and_can_be_filtered(tmp_path: Path) -> None:
    command = "echo out $ALLSTEP_RANK; echo err $ALLSTEP_RANK >&2"
    done = run("run", "-np", "3", "--show", "0,2", "--log-dir", tmp_path / "logs", *SH, command)
    assert sorted(done.out.splitlines()) == ["[0] out 0", "[2] out 2"]
    assert sorted(done.err.splitlines()) == ["[0] err 0", "[2] err 2"]
    for rank in range(3):
        assert sorted((tmp_path / f"logs/rank-{rank}.log").read_text().split("\n")) == [
            "",
            f"err {rank}",
            f"out {rank}",
        ]


def test_colours_only_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    env = {**clean_environment(), "TERM": "xterm"}
    subprocess.run(
        [*ALLSTEP, "run", "-np", "1", "echo", "hello"],
        stdout=theirs,
        stderr=theirs,
        env=env,
        timeout=90,
        check=True,
    )
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 1)[0]:
        try:
            shown += os.read(ours, 1000)
        except OSError:
            break
    os.close(ours)
    assert b"\x1b[36m[0]\x1b[0m hello" in shown
    assert "\x1b" not in run("run", "-np", "1", "echo", "hello").out


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    flag = tmp_path / "done"
    command = f"for i in $(seq 2000); do echo line $i; done; touch {flag}"
    pipeline = f"{' '.join(ALLSTEP)} run -np 1 sh -c '{command}' | head -1"
    subprocess.run(
        ["bash", "-c", pipeline],
        env=clean_environment(),
        timeout=90,
        check=True,
        capture_output=True,
    )
    wait_until(flag.exists, 60, "the end of the worker")


def test_exit_codes_are_passed_on() -> None:
    assert run("run", "-np", "2", "true").code == 0
    failed = run("run", "-np", "2", *SH, 'test "$ALLSTEP_RANK" = 0 || exit 42')
    assert failed.code == 42
    assert "rank 1 on localhost failed first of 2: exit code 42" in failed.last_lines
    saved = run("run", "-np", "2", *SH, "exit 75")
    assert (saved.code, saved.err) == (75, "")


EXPLAINED = """
if [ "$ALLSTEP_RANK" = 0 ]
then echo 'allstep: no such net' >&2; echo '  what to try' >&2; touch explained
else while [ ! -e explained ]; do sleep 0.05; done; fi; exit 2
"""


def test_what_rank_0_has_explained_is_not_repeated(tmp_path: Path) -> None:
    text = "[0] allstep: no such net\n[0]   what to try\n"
    done = run("run", "-np", "2", *SH, EXPLAINED, cwd=tmp_path)
    assert done.code == 2
    assert done.err.startswith(
        f"{text}allstep run: rank 0 on localhost failed first of 2: exit code 2, "
    )
    assert done.err.count("\n") == 3
    (tmp_path / "explained").unlink()
    verb = (
        f"import sys; from allstep.launch import launch; sys.exit(launch({[*SH, EXPLAINED]!r}, 2))"
    )
    quiet = subprocess.run(
        [sys.executable, "-c", verb], cwd=tmp_path, env=clean_environment(), capture_output=True
    )
    assert (quiet.returncode, quiet.stderr.decode()) == (2, text)


def test_the_others_are_stopped_with_their_children(tmp_path: Path) -> None:
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    script = (
        'if [ "$ALLSTEP_RANK" = 1 ]; then sleep 0.5; echo "the cause" >&2; exit 9; fi; '
        "sleep 1000 & setsid sleep 1000 & trap '' TERM; sleep 1000; sleep 1000"
    )
    done = run("run", "-np", "2", *SH, script, env={"RUN_MARK": mark})
    assert done.code == 9
    assert "the cause" in done.last_lines
    assert done.seconds < 30  # SIGTERM is ignored there: SIGKILL after 3 s
    assert not processes_with(f"RUN_MARK={mark}")


@pytest.mark.soak
def test_nothing_survives_a_killed_launcher() -> None:
    mark = f"RUN_MARK={os.getpid()}.{time.monotonic_ns()}"
    name, _, value = mark.partition("=")
    process = start(
        "run", "-np", "2", *SH, "setsid sleep 1000 & echo up; sleep 1000; true", env={name: value}
    )
    wait_until(lambda: "up" in process.stdout.readline(), 60, "a worker")
    wait_until(lambda: len(processes_with(mark)) >= 6, 30, "all processes")
    process.kill()
    wait_until(lambda: not processes_with(mark), 30, "the end of all processes")
    process.communicate()


def test_a_killed_agent_is_a_failure_and_leaves_nothing() -> None:
    mark = f"RUN_MARK={os.getpid()}.{time.monotonic_ns()}"
    name, _, value = mark.partition("=")
    process = start("run", "-np", "2", *SH, "echo $PPID; sleep 1000", env={name: value})
    agent = int(process.stdout.readline().split()[1])
    os.kill(agent, signal.SIGKILL)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 1
    assert "host localhost is lost: its agent was killed (ranks 0-1)" in err
    wait_until(lambda: not processes_with(mark), 30, "the end of all processes")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-np", "2", "no-such-command"], "command not found: no-such-command"),
        (
            ["-np", "5", "-H", "localhost:4", "true"],
            "-np 5 asks for more workers than the 4 slots listed (localhost:4)",
        ),
        (["-np", "0", "true"], "-np 0: at least 1"),
        (["true"], "the number of workers is missing"),
        (["-np", "2", "--show", "0,2", "true"], "no rank 2 among 2 workers"),
        (["-np", "2", "--show", "a", "true"], "--show a"),
        (["-H", "a:2,a:1", "true"], "host a is listed twice"),
        (["-H", "a:b", "true"], "'a:b' is not HOST or HOST:NUMBER"),
        (["--hostfile", "nowhere", "true"], "--hostfile nowhere: No such file"),
        (
            ["-np", "1", "--env-only", "NO_SUCH_NAME_", "true"],
            "--env-only NO_SUCH_NAME_: no such variable",
        ),
    ],
)
def test_wrong_use_is_one_clear_line(arguments: list[str], text: str) -> None:
    done = run("run", *arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("\n") == 1, done.err
    assert text in done.err


def test_a_flag_with_a_typo() -> None:
    done = run("run", "-np", "2", "--log-dri", "x", "true")
    assert done.code == 2
    assert "--log-dir" in done.err
    assert "Traceback" not in done.err


def test_flags_behind_the_command_are_the_commands() -> None:
    done = run("run", "-np", "1", "echo", "--show", "7", "--help", "-np")
    assert done.out == "[0] --show 7 --help -np\n"
    assert run("run", "-np", "1", "--", "echo", "hi").out == "[0] hi\n"


def test_a_launcher_inside_several_tasks_of_another_is_refused() -> None:
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    done = run("run", "-np", "2", "true", env=env)
    assert done.code == 2
    assert "openmpi started `allstep run` itself 2 times" in done.err


def test_a_worker_finds_the_interpreter_and_the_launchers_override_is_not_inherited(
    tmp_path: Path,
) -> None:
    done = run(
        "run",
        "-np",
        "1",
        *SH,
        "which python; echo launcher=$ALLSTEP_LAUNCHER",
        env={"ALLSTEP_LAUNCHER": "none"},
    )
    assert done.out.splitlines()[0] == f"[0] {Path(sys.executable).parent / 'python'}"
    assert done.out.splitlines()[1] == "[0] launcher="
