"""The longer scripts of benchmarks/: each really runs once, tiny; comparisons and exits are tested
on figures made up.

Starting hosts and importing torch is most of the time here, so a script runs in this process, and
one start serves several checks.
"""

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread, Timer
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
from torch import nn

from allstep.bench import Row
from allstep.bench.comm.result import GLOO, MB, PRIVATE, SHARED, CommRow
from allstep.comm.network.algorithms import ALGORITHMS
from allstep.runlog import RunRecord
from support.allstep_command import processes_with
from support.hosts import why_not
from support.ranks import Ranks, wait_until

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
NO_HOSTS = why_not("ssh", "sshd", "ssh-keygen", "tc")
needs_hosts = pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))


def _load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


two_hosts = _load("two_hosts")
ddp = _load("ddp_alexnet")
optimizers = _load("optimizers")
norms = _load("sync_batch_norm")
shares = _load("shares")


# Between hosts


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the script has found so far, seen before it is shown."""
    found: list[Any] = []

    class Seen(two_hosts.Found):  # type: ignore[name-defined,misc]
        def __init__(self, *figures: Any) -> None:
            super().__init__(*figures)
            found.append(self)

    monkeypatch.setattr(two_hosts, "Found", Seen)
    return found


@pytest.fixture
def ctrl_c_at_16_mb(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A real one, in the midst of the turns.

    Yields a list for the processes that are there then.
    """
    there: list[int] = []

    class Interrupted(two_hosts.CountedTurns):  # type: ignore[name-defined,misc]
        def warm_up(self) -> None:
            if self._nbytes == 16 * MB:
                there.extend(processes_with(_mark()))
                Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            super().warm_up()

    monkeypatch.setattr(two_hosts, "CountedTurns", Interrupted)
    before = signal.getsignal(signal.SIGTERM)
    yield there
    signal.signal(signal.SIGTERM, before)


def _mark() -> str:
    return f"{os.getpid()}.{os.environ['PYTEST_CURRENT_TEST'].split(' ')[0]}"


@pytest.mark.usefixtures("namespaces")
@needs_hosts
def test_sums_between_hosts_and_an_interruption_that_leaves_nothing(
    measured: list[Any],
    ctrl_c_at_16_mb: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One start for both: 4 KB and 4 MB are measured, and Ctrl-C comes at 16 MB."""
    monkeypatch.setenv("MARK", _mark())  # in the environment of all processes of the run
    options = ["--mbit", "600", "--repetitions", "1"]
    assert two_hosts.command([*options, "--sizes", "4KB,4MB,16MB"]) == 130
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert len(ctrl_c_at_16_mb) > 4  # hosts, daemons and ranks
    wait_until(lambda: processes_with(_mark()) == [])
    rate = re.search(r"600 Mbit/s each way requested, (\d+) Mbit/s measured", said.out)
    assert rate and 20 < int(rate[1]) < 660  # less on a machine that is busy with something else

    monkeypatch.setattr(two_hosts, "measure", lambda *_: list(measured))
    file = tmp_path / "figures.json"
    assert two_hosts.command([*options, "--sizes", "4KB,4MB", "--json", str(file)]) == 0
    assert "plain TCP" in capsys.readouterr().out
    _check_sums(json.loads(file.read_text())["rows"])


def _check_sums(rows: list[dict[str, Any]]) -> None:
    names = [SHARED, PRIVATE, GLOO, *(f"allstep, {name}" for name in ALGORITHMS), "plain TCP"]
    assert [(row["bytes"], row["name"]) for row in rows] == [
        (n, name) for n in (4096, 4 * MB) for name in names
    ]
    large = {row["name"]: row for row in rows[len(names) :]}
    for row in (
        large.values()
    ):  # all must send 4 MB; headers, acknowledgements and what TCP sends again come on top
        assert row["must_send"] == 4 * MB < row["sent"]
        # The first 512 KB of a turn may pass at once, and again at the switch; nothing else is
        # quicker than the rate.
        assert row["min"] > 3 * MB * 8 / 660e6
    for name in ("plain TCP", SHARED, PRIVATE, "allstep, ring"):
        assert large[name]["sent"] < 1.25 * 4 * MB, name  # as if each host were one rank
    assert large[GLOO]["sent"] > 1.25 * 4 * MB  # 2 ranks a host, flat: 2 x 3/4 of the tensor


def test_without_root_there_are_no_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    why_not.cache_clear()
    try:
        assert two_hosts.command([]) == 2
    finally:
        why_not.cache_clear()
    assert "needs root" in capsys.readouterr().err


def test_a_wrong_sum_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_wrong_options_say_what_is_wrong(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(two_hosts.command(options))
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("processes")
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
        thread.join(100)
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
    rows = [
        _found(nbytes, PRIVATE, ours),
        _found(nbytes, GLOO, gloo),
        _found(nbytes, "plain TCP", 0.28),
    ]
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


def _small_net() -> nn.Module:
    """Stands in for AlexNet, whose 61 million weights take long to make. It has dropout, too."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(), nn.Linear(48, 1000))


def _train_with_ddp(file: Path) -> int:
    script = _load("ddp_alexnet")
    script.AlexNet = _small_net  # type: ignore[attr-defined]
    sys.argv = [
        "ddp_alexnet.py",
        "--batch",
        "1",
        "--turns",
        "1",
        "--steps",
        "2",
        "--json",
        str(file),
    ]
    status: int = script.main()
    return status


def test_ddp_learns_the_same_on_both_backends(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert ranks(2, _train_with_ddp, file) == [0, 0]
    ours, gloo = json.loads(file.read_text())["rows"]
    assert (ours["name"], gloo["name"]) == ("allstep", "gloo")
    assert len(ours["losses"]) == len(gloo["losses"]) == 4  # the turn that warms up included
    assert ours["losses"] == pytest.approx(gloo["losses"], rel=1e-5)
    assert len(set(ours["losses"])) == 4  # every step is another
    for row in (ours, gloo):
        assert row["images_per_second"] == pytest.approx(4 / row["seconds"][0])


def test_ddp_starts_its_own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def become(python: str, command: list[str], env: dict[str, str]) -> NoReturn:
        raise SystemExit(f"{env['OMP_NUM_THREADS']} {' '.join(command)}")

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr(sys, "argv", ["ddp_alexnet.py", "--workers", "3"])
    monkeypatch.delenv("ALLSTEP_RANK", raising=False)
    run = (
        f"{sys.executable} -P -m allstep run -np 3 --show 0 {sys.executable} ddp_alexnet.py"
        " --workers 3"
    )
    with pytest.raises(SystemExit, match=re.escape(f"1 {run}")):
        ddp.main()


@pytest.mark.parametrize(("other", "status"), [(6.9, 0), (6.8, 1), (float("nan"), 1)])
def test_losses_that_differ_are_an_error(
    other: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {
        "allstep": ddp.Trainee(None, None, [9.0, 1.0, 1.0], [6.91, other]),
        "gloo": ddp.Trainee(None, None, [9.0, 1.2, 1.2], [6.91, 6.9]),
    }
    options = argparse.Namespace(workers=2, batch=32, steps=1, turns=2, json=None)
    assert ddp.show(both, options) == status
    shown = capsys.readouterr()
    assert "1.200 times Gloo; target 1.08: met" in shown.out
    assert ("losses differ" in shown.err) == bool(status)


# The update


def _weights_only() -> nn.Module:
    """Stands in for ResNet-50: scaled layers and exempt ones, and more than one for each of two
    owners."""
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def _time_updates(file: Path) -> int:
    script = _load("optimizers")
    script.resnet50 = _weights_only  # type: ignore[attr-defined]
    sys.argv = ["optimizers.py", "--turns", "2", "--steps", "1", "--json", str(file)]
    status: int = script.main()
    return status


def test_updates_alone_and_with_shared_weights(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert ranks(2, _time_updates, file) == [0, 0]
    rows = json.loads(file.read_text())["rows"]
    alone = [row for row in rows if row["workers"] == 1]
    assert [row["name"] for row in alone] == list(optimizers.CONTENDERS)
    assert [(row["name"], row["reference"]) for row in alone if row["target"]] == [
        ("LARS", "SGD, foreach"),
        ("LAMB", "AdamW, foreach"),
    ]
    shared = [(row["name"], row["what"]) for row in rows if row["workers"] == 2]
    assert shared == [
        (name, what)
        for name in optimizers.SHARING
        for what in (optimizers.UPDATE, optimizers.WHOLE)
    ]
    assert all(len(row["seconds"]) == len(row["reference_seconds"]) == 2 for row in rows)


@pytest.mark.parametrize(
    ("workers", "what", "own", "met"),
    [
        (1, "apply()", (1.4, 9.0, 1.5), True),  # 1.5 times as long in the middle turn
        (1, "apply()", (1.6, 9.0, 1.5), False),
        (2, "apply()", (0.5, 0.6, 2.0), False),  # 1.67 times as fast
        (2, "apply()", (0.5, 0.4, 9.0), True),
        (2, "reduce_gradients() and apply()", (0.5, 0.4, 9.0), None),
    ],
)
def test_targets_of_updates(
    workers: int, what: str, own: tuple[float, ...], met: bool | None
) -> None:
    """Ratios are taken turn by turn, and their median counts."""
    found = optimizers.Found(workers, what, Row("LARS", own), Row("other", (1.0, 1.0, 1.0)))
    assert found.met is met


# Shares by speed


def _half_speed(seconds: float, own: tuple[float, float], weights: list[int]) -> RunRecord:
    """Lines of 10 steps of 64 samples each, of workers that need `own` seconds for input and
    compute."""
    phases = {"input": [0.0, 0.0], "compute": list(own)}
    steps = [{"samples": 640 * (i + 1), "seconds": seconds, **phases} for i in range(20)]
    events = ({"samples": 1280, "shares": weights},) if weights else ()
    return RunRecord(steps=tuple(steps), events=events, ends=({"test": {"loss": 0.5}},))


def test_the_gain_of_shares_counts_from_the_given_step(capsys: pytest.CaptureFixture[str]) -> None:
    even = shares.measured(_half_speed(2.2, (1.0, 2.0), []), 100 * 64)
    speed = shares.measured(_half_speed(1.6, (1.4, 1.4), [42, 22]), 100 * 64)
    assert even.speed == pytest.approx(640 / 2.2) and even.shares == [1, 1]
    # Both would need 4/3 s for their work, and 0.2 s for the rest.
    assert even.ideal == pytest.approx(2.2 / (4 / 3 + 0.2))
    assert speed.shares == [42, 22] and speed.ideal == pytest.approx(1.0)
    pair = shares.Pair(even, speed)
    assert pair.ratio == pytest.approx(2.2 / 1.6)
    shares.show([pair, pair])
    assert "1.38 times shares=even (1.38 to 1.38, 2 rounds)" in (out := capsys.readouterr().out)
    assert out.rstrip().endswith("target 1.3: met")


# Synchronised batch norm


def _two_norms(num_classes: int, small_pictures: bool) -> nn.Module:
    """Stands in for ResNet-18."""
    norms = [nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    return nn.Sequential(*norms, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))


def _train_with_norms(file: Path) -> int:
    script = _load("sync_batch_norm")
    script.resnet18 = _two_norms  # type: ignore[attr-defined]
    sys.argv = [
        "sync_batch_norm.py",
        "--batch",
        "2",
        "--turns",
        "1",
        "--steps",
        "1",
        "--json",
        str(file),
    ]
    status: int = script.main()
    return status


def test_where_the_time_of_synchronised_norms_goes(ranks: Ranks, tmp_path: Path) -> None:
    """Each kind of collective is seen where it happens, and nowhere else."""
    file = tmp_path / "figures.json"
    assert ranks(2, _train_with_norms, file) == [0, 0]
    plain, sync = json.loads(file.read_text())["rows"]
    assert (plain["name"], sync["name"]) == ("BatchNorm", "SyncBatchNorm")
    assert sync["ratio"] == pytest.approx(sync["seconds"][0] / plain["seconds"][0])
    assert not any(plain["parts"][f"norms: {kind}"] for kind in ("waiting", "moving", "adding"))
    assert sync["parts"]["norms: moving"] > 0
    for row in (plain, sync):
        assert row["parts"]["gradients: moving"] > 0 and row["parts"]["arithmetic"] > 0


@pytest.mark.parametrize(
    ("sync", "words"), [(1.15, "at most 1.15: met"), (1.16, "at most 1.15: not met")]
)
def test_the_target_of_synchronised_norms(
    sync: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [dict.fromkeys(norms.PARTS, 0.1)]
    both = {
        "BatchNorm": norms.Trainee(None, None, [1.0, 2.0], parts),
        "SyncBatchNorm": norms.Trainee(None, None, [sync, 2 * sync], parts),
    }
    norms.show(
        norms.findings(both), argparse.Namespace(workers=2, batch=64, steps=1, turns=2, json=None)
    )
    shown = capsys.readouterr().out
    assert words in shown and re.search(r"norms: waiting +100\.00 +100\.00 +0\.00 +\+0\.0%", shown)
