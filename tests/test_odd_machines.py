"""Limits, clocks and folders as other machines have them: a command works, or ends with one line.

The full table of what was tried is in docs/security.md; here are the quick ones. Limits are set in
a shell, as users meet them.
"""

import errno
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allstep.cli.shortage import shortage
from allstep.errors import ConfigError
from support.allstep_command import Done
from support.image_folders import make_folder
from support.ranks import clean_environment

ALLSTEP = shlex.join([sys.executable, "-m", "allstep"])
# Root without the right to ignore permissions is as good as an ordinary user.
AS_USER = (
    "setpriv --bounding-set=-dac_override,-dac_read_search"
    " --inh-caps=-dac_override,-dac_read_search -- "
)

# From one second after a process has started, its wall clock jumps by hours and back 10 times a
# second.
CLOCK = """
import os, time
real, began, hours = time.time, time.monotonic(), float(os.environ["SHIFT_HOURS"])
def jumps():
    return time.monotonic() > began + 1 and int(time.monotonic() * 10) % 2
time.time = lambda: real() + 3600 * hours * jumps()
"""


def shell(line: str, env: dict[str, str] | None = None, limit: float = 120) -> Done:
    """Run a line of shell in which `allstep` is ours."""
    script = f'allstep() {{ {ALLSTEP} "$@"; }}; {line}'
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        errors="replace",
        env={**clean_environment(), **(env or {})},
        timeout=limit,
    )
    return Done(done.returncode, done.stdout, done.stderr, 0.0)


def is_one_line(done: Done, start: str) -> bool:
    """Whether all of standard error is one line of ours."""
    return done.err.startswith(start) and done.err.count("\n") == 1


@pytest.mark.usefixtures("namespaces")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small disk")
@pytest.mark.parametrize(
    "command",
    [
        "train digits --dry-run -n 1 --out disk/run",
        "study batch digits --batches 64 --remedies plain --out disk/s",
    ],
)
def test_a_full_disk_is_not_taken_for_standard_output(tmp_path: Path, command: str) -> None:
    fill = (
        "mkdir disk && mount -t tmpfs -o size=16k tmpfs disk && { dd if=/dev/zero of=disk/fill"
        " bs=1k 2>/dev/null; true; }"
    )
    env = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    done = shell(
        f"cd {tmp_path}; export -f allstep; unshare --mount bash -c '{fill}; allstep {command}'",
        env,
    )
    assert done.code != 0
    assert "Traceback" not in done.err and "standard output" not in done.err, done.err
    assert re.fullmatch(
        r"allstep: .*/disk/.*: No space left on device.*", done.err.splitlines()[-1]
    ), done.err


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("files", [64, 1024])
def test_few_open_files_are_enough(tmp_path: Path, files: int) -> None:
    make_folder(tmp_path / "src", per_class=30)
    done = shell(
        f"ulimit -n {files}; allstep run -np 2 echo hi && allstep data pack {tmp_path}/src"
        f" {tmp_path}/out"
    )
    assert done.code == 0, done.err
    assert "90 samples in 1 shard" in done.out


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(150)
def test_training_with_64_open_files(tmp_path: Path) -> None:
    done = shell(f"ulimit -n 64; allstep train digits epochs=1 --workers 2 --out {tmp_path}/run")
    assert done.code == 0, done.err


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("files", "workers"), [(12, 2), (64, 40)])
def test_too_few_open_files_are_one_line(files: int, workers: int) -> None:
    done = shell(f"ulimit -n {files}; allstep run -np {workers} sleep 100")
    assert done.code in (1, 2)
    assert is_one_line(done, "allstep: "), done.err
    assert f"the limit is {files}" in done.err
    assert "`ulimit -n " in done.err


@pytest.mark.usefixtures("processes")
def test_too_little_memory_is_one_line(tmp_path: Path) -> None:
    """300 MB of address space are less than the libraries of the input pipeline need."""
    make_folder(tmp_path / "src", per_class=1)
    done = shell(f"ulimit -v 300000; allstep data pack {tmp_path}/src {tmp_path}/out")
    assert done.code == 1
    assert is_one_line(done, "allstep: out of memory (`ulimit -v` allows 307 MB)"), done.err


@pytest.mark.usefixtures("processes")
def test_training_is_refused_where_torch_would_crash(tmp_path: Path) -> None:
    done = shell(
        f"ulimit -v 900000; allstep train digits epochs=1 --workers 2 --out {tmp_path}/run"
    )
    assert done.code == 2
    assert is_one_line(done, "allstep: `ulimit -v` allows 922 MB, but PyTorch needs 1.5 GB"), (
        done.err
    )
    assert not (tmp_path / "run").exists()


def test_what_has_run_out_is_named() -> None:
    files = f"the limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
    assert files in str(shortage(OSError(errno.EMFILE, "Too many open files")))
    assert "too many open files" in str(
        shortage(RuntimeError("[enforce fail] pipe: Too many open files"))
    )
    assert "no more threads" in str(shortage(RuntimeError("can't start new thread")))
    assert "out of memory" in str(shortage(MemoryError()))
    assert "2 GB wanted" in str(
        shortage(RuntimeError("DefaultCPUAllocator: can't allocate memory: 2 GB wanted\nmore"))
    )
    caused, meanwhile = ConfigError("start"), ValueError("a defect")
    caused.__cause__ = meanwhile.__context__ = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert "out of memory" in str(shortage(caused))
    assert shortage(meanwhile) is None
    for error in (
        ValueError("x"),
        OSError(errno.ENOENT, "gone"),
        BlockingIOError(errno.EAGAIN, "write could not complete"),
    ):
        assert shortage(error) is None


@pytest.fixture
def closed(tmp_path: Path):
    """A folder that may not be written to."""
    if shutil.which("setpriv") is None and os.geteuid() == 0:
        pytest.skip("needs setpriv: root may write anywhere")
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    yield folder
    folder.chmod(0o755)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "arguments",
    [
        "run -np 1 --log-dir {}/logs true",
        "train digits epochs=1 --workers 1 --out {}/run",
        "data pack {}/../src {}/out",
        "report {}/../run --out {}/page.html",
    ],
    ids=lambda text: text.partition(" {")[0],
)
def test_a_read_only_folder_is_one_line(closed: Path, arguments: str) -> None:
    make_folder(closed.parent / "src", per_class=1)
    (closed.parent / "run").mkdir()
    start = {"kind": "start", "time": 1e9, "config": {}}
    (closed.parent / "run" / "run.jsonl").write_text(json.dumps(start) + "\n")
    user = AS_USER if os.geteuid() == 0 else ""
    done = shell(f"{user}{ALLSTEP} {arguments.replace('{}', str(closed))}")
    assert done.code == 2, done.err
    assert is_one_line(done, "allstep: "), done.err
    assert "Permission denied" in done.err
    assert str(closed) in done.err


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("hours", [-5, 5])
def test_a_clock_that_is_set_during_a_run(tmp_path: Path, hours: int) -> None:
    """Launcher and workers see the wall clock jump again and again."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    env = {
        "SHIFT_HOURS": str(hours),
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    command = f"allstep train digits epochs=2 --workers 2 --max-time 30m --out {tmp_path}/run"
    done = shell(f"{command} && allstep report {tmp_path}/run", env)
    assert done.code == 0, done.out + done.err
    times = [
        json.loads(line)["time"]
        for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()
    ]
    assert times == sorted(times)
    assert times[-1] - times[0] < 600


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("command", ["data info", "train data.train=", "report"])
def test_a_name_that_the_system_refuses(command: str) -> None:
    done = shell(f"allstep {command}{'' if command.endswith('=') else ' '}{'x' * 5000}")
    assert done.code in (1, 2) and is_one_line(done, "allstep: "), done.err[-500:]
    assert "File name too long" in done.err and len(done.err) < 300
