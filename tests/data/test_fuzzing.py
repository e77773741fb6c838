"""Damaged files of every kind never end in a traceback, a hang or more than 2 GB: see
`support.data_fuzzing`.

A few seconds of fixed cases; `make soak` takes new ones for minutes.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from support import data_fuzzing

SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
CASES = {"tar": 150, "tfrecord": 120, "idx": 400, "cifar": 400, "images": 100}
SOAK_SECONDS = 150


def run(
    folder: Path, kind: str, seed: int, count: int, seconds: float
) -> subprocess.CompletedProcess[str]:
    """Cases in a process of their own, with its limits."""
    arguments = [kind, str(seed), str(count), str(seconds), str(folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, data_fuzzing.__file__, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=env, check=False
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.soak(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", CASES)
def test_damaged_files_are_refused_or_read(kind: str, tmp_path: Path) -> None:
    seed = random.randrange(1 << 40) if SOAK else 0
    seconds = SOAK_SECONDS if SOAK else 300
    done = run(tmp_path, kind, seed, 1 << 30 if SOAK else CASES[kind], seconds)
    last = done.stdout.split()[-1] if done.stdout else "none"
    assert done.returncode == 0 and last == "end", f"{kind}, case {last}:\n{done.stderr[-4000:]}"
    assert done.stdout.count("\n") == CASES[kind] + 1 or SOAK
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("processes")
def test_the_fuzzer_finds_what_it_looks_for(tmp_path: Path) -> None:
    """A traceback, a hang and too much memory each end it, and it names the case."""
    source = (
        "import sys, time; from support import data_fuzzing; data_fuzzing.SECONDS = 1;"
        " data_fuzzing.use = {}; data_fuzzing.main({})"
    )
    for fault, sign in (
        ("lambda *given: int('x')", "ValueError"),
        ("lambda *given: bytes(3 << 30)", "MemoryError"),
        ("lambda *given: time.sleep(60)", "Timeout (0:00:01)!"),
    ):
        folder = tmp_path / sign
        call = f"'idx', 7, 1, 60, data_fuzzing.Path({str(folder)!r})"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        code = source.format(fault, call)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
        )
        assert done.returncode != 0 and done.stdout.split() == ["7"] and sign in done.stderr, (
            done.stderr
        )


@pytest.mark.parametrize("kind", CASES)
def test_a_case_is_repeated_by_its_number(kind: str, tmp_path: Path) -> None:
    def case(name: str, number: int) -> list[bytes]:
        (tmp_path / name).mkdir()
        data_fuzzing.make_case(kind, number, tmp_path / name)
        return [
            path.read_bytes() for path in sorted((tmp_path / name).rglob("*")) if path.is_file()
        ]

    assert case("first", 3) == case("second", 3)
    assert case("third", 4) != case("fourth", 5)
