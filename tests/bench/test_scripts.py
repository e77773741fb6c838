"""The longer scripts of benchmarks/: each really runs once, tiny; comparisons and exits are tested on figures made up."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace

import pytest

from allstep.bench import Row
from allstep.bench.comm_result import GLOO, MB, PRIVATE, SHARED, CommRow
from allstep.comm.algorithms import ALGORITHMS
from hosts import why_not
from launch.command import processes_with
from ranks import clean_environment, wait_until

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
NO_HOSTS = why_not("ssh", "sshd", "ssh-keygen", "tc")
needs_hosts = pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))


def _load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _running(name: str, *options: str) -> "Iterator[subprocess.Popen[str]]":
    """As a user would run it; all processes of the run have the mark of the test in their environment."""
    with subprocess.Popen(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *options],
        env={**clean_environment(), "MARK": _mark()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _mark() -> str:
    return f"{os.getpid()}.{os.environ['PYTEST_CURRENT_TEST'].split(' ')[0]}"


two_hosts = _load("two_hosts")
ddp = _load("ddp_alexnet")


# Between hosts


@needs_hosts
@pytest.mark.timeout(120)
def test_sums_between_hosts_and_the_bytes_that_cross(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--mbit", "300", "--sizes", "4KB,4MB", "--repetitions", "1", "--json", str(file)]
    with _running("two_hosts", *options) as process:
        out, err = process.communicate(timeout=110)
    assert process.returncode == 0, out + err
    assert processes_with(_mark()) == []
    rate = re.search(r"300 Mbit/s each way asked for, (\d+) Mbit/s measured", out)
    assert rate and 100 < int(rate[1]) < 330
    rows = json.loads(file.read_text())["rows"]
    names = [SHARED, PRIVATE, GLOO, *(f"allstep, {name}" for name in ALGORITHMS), "plain TCP"]
    assert [(row["bytes"], row["name"]) for row in rows] == [(n, name) for n in (4096, 4 * MB) for name in names]
    large = {row["name"]: row for row in rows[len(names) :]}
    for row in large.values():  # all must send 4 MB; headers, acknowledgements and what TCP sends again come on top
        assert row["must_send"] == 4 * MB < row["sent"]
        # The first 512 KB of a turn may pass at once, and again at the switch; nothing else is quicker than the rate.
        assert row["min"] > 3 * MB * 8 / 330e6
    for name in ("plain TCP", SHARED, PRIVATE, "allstep, ring"):
        assert large[name]["sent"] < 1.25 * 4 * MB, name  # as if each host were one rank
    assert large[GLOO]["sent"] > 1.25 * 4 * MB  # 2 ranks a host, flat: 2 x 3/4 of the tensor


@needs_hosts
@pytest.mark.timeout(120)
def test_an_interrupted_run_leaves_nothing() -> None:
    with _running("two_hosts", "--sizes", "4KB", "--repetitions", "1000") as process:
        assert process.stderr
        assert "4 KB" in process.stderr.readline()  # hosts, daemons and ranks are there
        assert len(processes_with(_mark())) > 4
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    wait_until(lambda: processes_with(_mark()) == [])


def test_without_root_there_are_no_hosts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    why_not.cache_clear()
    try:
        assert two_hosts.command([]) == 2
    finally:
        why_not.cache_clear()
    assert "needs root" in capsys.readouterr().err


def test_a_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object) -> None:
        raise two_hosts.CommFailed("Gloo, rank 1: wrong sum")

    monkeypatch.setattr(two_hosts, "measure", fail)
    monkeypatch.setattr(two_hosts, "why_not", lambda *programs: None)
    assert two_hosts.command([]) == 1
    assert "wrong sum" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "1"], "whole number of 2 or more"),
        (["--mbit", "fast"], "'fast' is not a whole number"),
        (["--sizes", "4X"], "--sizes"),
        (["--json", "/no/folder/here.json"], "there is no folder"),
    ],
)
def test_wrong_options_say_what_is_wrong(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(two_hosts.command(options))
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_plain_tcp_sends_what_each_host_must() -> None:
    """Three hosts in a ring, here on three addresses of the loopback."""
    addresses = [f"127.0.0.{10 + k}" for k in range(3)]
    ends: dict[int, object] = {}

    def serve(rank: int) -> None:
        end = two_hosts.PlainTcp(SimpleNamespace(rank=rank, size=3), addresses)
        ends[rank] = end
        assert end.answer({"prepare": 3 * MB}) == {"absent": {}}
        answers[rank] = end.answer({"measure": "plain TCP", "calls": 2})["seconds"]

    answers: dict[int, list[float]] = {}
    threads = [Thread(target=serve, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [len(answers[rank]) for rank in range(3)] == [2, 2, 2]
    assert all(len(end._data) == 4 * MB for end in ends.values())  # type: ignore[attr-defined]
    for name in ("_to", "_from"):
        getattr(ends[0], name).close()
    with pytest.raises(OSError):
        ends[1].answer({"measure": "plain TCP", "calls": 1})  # type: ignore[attr-defined]
    for rank in (1, 2):
        for name in ("_to", "_from"):
            getattr(ends[rank], name).close()


def _found(nbytes: int, name: str, seconds: float) -> object:
    return two_hosts.Found(CommRow(4, nbytes, Row(name, (seconds,)), seconds), 1.5 * nbytes)


def _findings(ours: float, gloo: float, mbit: int = 1000, nbytes: int = 32 * MB) -> object:
    options = argparse.Namespace(hosts=2, ranks_per_host=2, mbit=mbit)
    rows = [_found(nbytes, PRIVATE, ours), _found(nbytes, GLOO, gloo), _found(nbytes, "plain TCP", 0.28)]
    return two_hosts.Findings(options, rows, {})


@pytest.mark.parametrize(
    ("findings", "met"),
    [
        (_findings(0.30, 0.42), True),
        (_findings(0.33, 0.60), False),  # 1.18 times the wire
        (_findings(0.30, 0.39), False),  # 1.30 times Gloo
        (_findings(0.33, 0.60, mbit=100), None),
        (_findings(0.33, 0.60, nbytes=MB), None),
    ],
)
def test_targets_between_hosts(findings: object, met: bool | None) -> None:
    rows = findings.rows  # type: ignore[attr-defined]
    assert [findings.met(found.row) for found in rows] == [met, None, None]  # type: ignore[attr-defined]


def test_comparisons_between_hosts() -> None:
    row = json.loads(_findings(0.35, 0.70).to_json())["rows"][0]  # type: ignore[attr-defined]
    assert row["times_tcp"] == pytest.approx(1.25)
    assert row["times_gloo"] == pytest.approx(2)
    assert row["sent"] == 48 * MB and row["must_send"] == 32 * MB
    assert [two_hosts.share_of(hosts, 12) for hosts in (2, 3, 4)] == [12, 16, 18]


# DDP


@pytest.mark.timeout(120)
def test_ddp_learns_the_same_on_both_backends(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with _running("ddp_alexnet", "--batch", "1", "--turns", "1", "--steps", "2", "--json", str(file)) as process:
        out, err = process.communicate(timeout=110)
    assert process.returncode == 0, out + err
    ours, gloo = json.loads(file.read_text())["rows"]
    assert (ours["name"], gloo["name"]) == ("allstep", "gloo")
    assert len(ours["losses"]) == len(gloo["losses"]) == 4  # the turn that warms up included
    assert ours["losses"] == pytest.approx(gloo["losses"], rel=1e-5)
    assert len(set(ours["losses"])) == 4  # every step is another
    for row in (ours, gloo):
        assert row["images_per_second"] == pytest.approx(4 / row["seconds"][0])


@pytest.mark.parametrize(("other", "status"), [(6.9, 0), (6.8, 1), (float("nan"), 1)])
def test_losses_that_differ_are_an_error(other: float, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    both = {
        "allstep": ddp.Trainee(None, None, [9.0, 1.0, 1.0], [6.91, other]),
        "gloo": ddp.Trainee(None, None, [9.0, 1.2, 1.2], [6.91, 6.9]),
    }
    options = argparse.Namespace(workers=2, batch=32, steps=1, turns=2, json=None)
    assert ddp.show(both, options) == status
    shown = capsys.readouterr()
    assert "1.200 times Gloo; target 1.08: met" in shown.out
    assert ("losses differ" in shown.err) == bool(status)
