"""Cause and consequence by what ranks record in the launcher's store, not by what they print."""

import json
from pathlib import Path

import pytest

from allstep.launch.cause import Failure, blamed_by, first
from support.allstep_command import run

LOST = ("Traceback (most recent call last):", "RuntimeError: Connection closed by peer")


def record(kind: str, peer: object) -> bytes:
    return json.dumps({"kind": kind, "reason": "why", "peer": peer, "teller": 0}).encode()


@pytest.mark.parametrize(
    ("found", "blamed"),
    [
        (record("PeerLost", 2), 2),
        (record("CommError", 0), 0),
        (record("CollectiveTimeout", 2), None),
        (record("CommError", None), None),
        *((record("PeerLost", odd), None) for odd in ("2", True, 2.0, [2])),
        *((odd, None) for odd in (None, b"", b"[]", b"3", b"\xff", b"[" * 100_000)),
    ],
)
def test_what_a_record_blames(found: bytes | None, blamed: int | None) -> None:
    assert blamed_by(found) == blamed


def test_a_record_counts_more_than_what_was_printed() -> None:
    silent = Failure(0, "a", 4, 1.0, blames=1)
    own = Failure(1, "a", 5, 1.5, LOST, blames=1)
    assert silent.is_consequence and not own.is_consequence
    assert first([silent, own]) is own
    printed = Failure(2, "a", 1, 1.2, LOST)
    assert printed.is_consequence and not Failure(2, "a", 1, 1.2).is_consequence
    assert first([silent, printed]) is silent
    assert not Failure(0, "a", 1, 1.0, lost="silent", blames=3).is_consequence


# Rank 2 ends the group, as it does when it drops gradients. The others fail because of that, do not
# print it, and are the first to end.
HIDDEN = """
import os, sys, time
import allstep, torch, torch.distributed as dist
world = allstep.init()
group = dist.new_group([1, 2]) if {subgroup} else dist.group.WORLD
dist.barrier()
if world.rank == 2:
    group.guard.fail(group.guard.own_end("given up"))
    time.sleep(1.0)
    os._exit(5)
elif {subgroup} and world.rank == 0:
    time.sleep(600)
try:
    while True:
        dist.all_reduce(torch.ones(10), group=group)
except allstep.errors.CommError:
    os._exit(4)
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("subgroup", [False, True])
def test_a_rank_that_hides_its_error_is_still_a_consequence(tmp_path: Path, subgroup: bool) -> None:
    (tmp_path / "hidden.py").write_text(HIDDEN.format(subgroup=subgroup))
    done = run("run", "-np", "3", tmp_path / "hidden.py")
    assert done.code == 5, done.err
    assert done.last_lines.startswith(
        "allstep run: rank 2 on localhost failed first of 3: exit code 5, "
    ), done.err


# The error of rank 1 looks like a lost connection; rank 0 fails because of it, and prints nothing.
LOOKS_ALIKE = """
import os, sys, time
import allstep, torch, torch.distributed as dist
world = allstep.init()
dist.barrier()
if world.rank == 1:
    raise OSError("Broken pipe")
try:
    dist.all_reduce(torch.ones(10))
except allstep.errors.CommError:
    os._exit(4)
"""


@pytest.mark.usefixtures("processes")
def test_a_broken_pipe_of_its_own_is_a_cause(tmp_path: Path) -> None:
    (tmp_path / "alike.py").write_text(LOOKS_ALIKE)
    done = run("run", "-np", "2", tmp_path / "alike.py")
    assert done.code == 1, done.err
    assert done.last_lines.startswith(
        "allstep run: rank 1 on localhost failed first of 2: exit code 1, "
    ), done.err
    assert "OSError: Broken pipe" in done.last_lines


TWICE = "python a.py; python b.py"
A = """
import os, sys
import allstep, torch, torch.distributed as dist
world = allstep.init()
dist.barrier()
if world.rank == 1:
    os._exit(0)
try:
    dist.all_reduce(torch.ones(10))
except allstep.errors.CommError:
    os._exit(0)
"""
B = """
import sys, time
import allstep, torch.distributed as dist
world = allstep.init()
dist.barrier()
time.sleep(0.1 + world.rank)
sys.exit(6 if world.rank == 0 else 7)
"""


@pytest.mark.usefixtures("processes")
def test_the_record_of_a_program_before_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(A)
    (tmp_path / "b.py").write_text(B)
    done = run("run", "-np", "2", "sh", "-c", TWICE, cwd=tmp_path)
    assert done.code == 6, done.err
    assert done.last_lines.startswith(
        "allstep run: rank 0 on localhost failed first of 2: exit code 6, "
    ), done.err
