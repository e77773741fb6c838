"""Asynchronous training of whole runs: claims, synchronization points, the order log, replay.

One run of each mode serves several assertions.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import allstep
from allstep import runlog
from allstep.errors import CheckpointError, ConfigError
from allstep.kvstore.training import Push
from allstep.train import read_config
from allstep.train.check.replay import replay_run
from allstep.train.config.check_config import check_config, check_elastic
from allstep.train.config.check_sync import check_replacements, synchronous
from allstep.train.folder import order_file
from allstep.train.health.stop_request import Stopping
from allstep.train.run.progress import Paused
from allstep.train.run.train_request import TrainRequest
from allstep.train.run.worker import work
from allstep.train.step.pushing import check_pushes
from allstep.train.watch.events import Result
from allstep.train.watch.sync_line import sync_line
from conftest import SOAK
from support.allstep_command import run

SHORT = ["precision=float32", "epochs=2", "data.validation=50", "save.seconds=null", "batch=64"]
SHORT += ["log_every=4", "save.epochs=1", "save.keep=9"]
# Samples of the training split.
EPOCH = 1437 - 50


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Undo that a replay sets the threads of this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train_with_pauses(
    overrides: list[str], out: Path, stop_at: int | None = None, resume: bool = False
) -> Result | Paused | None:
    """Train as a worker that sleeps at random; stop at this step of this rank."""
    from allstep.train.run import worker
    from allstep.train.run.rounds import pushes

    rank = allstep.init().rank
    allstep.shutdown()
    draws, steps, step = random.Random(), [], pushes.reduce_step

    def paused(*args: Any) -> Any:
        time.sleep(draws.random() * 0.004)
        steps.append(1)
        return step(*args)

    class StopThere(Stopping):
        @property
        def why(self) -> str | None:
            return "reached" if rank == 0 and stop_at and len(steps) >= stop_at else None

    pushes.reduce_step, worker.Stopping = paused, StopThere  # type: ignore[assignment, misc]
    from allstep.train.run import loop

    loop.Stopping = StopThere  # type: ignore[misc]
    return work(TrainRequest("digits", [*SHORT, *overrides], out=out, resume=resume))


def pushes_of(folder: Path) -> list[Push]:
    return [Push(*fields) for entry in order_file.read(folder) for fields in entry.pushes]


def assert_each_sample_is_pushed_once(folder: Path, begin: int = 0, end: int = 2 * EPOCH) -> None:
    claims = sorted(
        (claim.start, claim.count) for push in pushes_of(folder) for claim in push.claims
    )
    position = begin
    for start, count in claims:
        assert start == position, "a gap, or a sample that was pushed twice"
        assert start // EPOCH == (start + count - 1) // EPOCH
        position += count
    assert position == end


@pytest.mark.parametrize(
    "overrides",
    [
        ["sync=async", "model.norm=batch", "optimizer.clip=1"],
        ["sync=stale:1", "optimizer=adamw", "optimizer.lr=0.001", "sync.correct=delay"],
        ["sync=clock:2", "optimizer=lars", "optimizer.lr=1", "accumulation=2"],
        ["sync=lazy:3", "sync.scale=false", "optimizer.lr=0.005", "growth.at=[1]"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_run_pushes_every_sample_once_and_can_be_replayed(
    ranks: Any, tmp_path: Path, overrides: list[str]
) -> None:
    out = tmp_path / "run"
    first, second = ranks(2, train_with_pauses, overrides, out)
    assert isinstance(first, Result)
    assert first.test == second.test, "all ranks evaluate the same weights"
    assert first.test.loss < 2.3, "it has learned, the lazy one in 20 updates"

    assert_each_sample_is_pushed_once(out)
    record = runlog.read(out / "run.jsonl")
    assert [each["samples"] for each in record.syncs] == [EPOCH, 2 * EPOCH]
    for each in record.syncs:
        assert sum(party["samples"] for party in each["parties"].values()) == EPOCH
        assert set(each["parties"]) == {"0", "1"}
        for party in each["parties"].values():
            assert party["made"] > party["read"] >= 0
            assert party["sent"] % party["pushes"] == 0
            # It receives at each push, at the begin of a round, and at the end of the last one.
            more = party["received"] // (party["sent"] // party["pushes"]) - party["pushes"]
            assert more == (1 if each is record.syncs[0] else 2)
    ages = [
        int(age) for each in record.syncs for p in each["parties"].values() for age in p["ages"]
    ]
    if overrides[0] == "sync=stale:1":
        assert max(ages) <= 2
    # Lines within the epochs, without a barrier; they add up to all samples.
    positions = [step["samples"] for step in record.steps]
    assert positions == sorted(positions)
    assert len(positions) > 4 and EPOCH in positions
    assert sum(sum(step["counts"]) for step in record.steps) == pytest.approx(2 * EPOCH, rel=0.02)
    seen = sum(step["images_per_second"] * step["seconds"] for step in record.steps)
    assert seen == pytest.approx(2 * EPOCH, rel=0.02)
    assert [each["samples"] for each in record.checkpoints][-1] == 2 * EPOCH

    replayed = replay_run(out)
    assert replayed.is_equal, replayed
    assert (replayed.begin, replayed.end, replayed.rounds) == (0, 2 * EPOCH, 2)
    assert replayed.pushes == len(pushes_of(out))


@pytest.mark.soak(20)
def test_a_random_run_can_be_replayed(ranks: Any, tmp_path: Path) -> None:
    draws, out = random.Random(None if SOAK else 3), tmp_path / "run"
    overrides = [
        "epochs=1",
        f"sync={draws.choice(['async', 'stale:1', 'stale:3', 'clock:1', 'lazy:2', 'lazy:5'])}",
        f"sync.correct={draws.choice(['none', 'delay'])}",
        f"batch={draws.choice([17, 40, 64])}",
        f"model.norm={draws.choice(['none', 'batch', 'group'])}",
        *draws.choice(
            [
                ["optimizer.momentum=0"],
                ["optimizer=adamw", "optimizer.lr=0.001"],
                ["optimizer=lars", "optimizer.lr=1"],
            ]
        ),
    ]
    ranks(draws.choice([2, 3, 4]), train_with_pauses, overrides, out)
    assert_each_sample_is_pushed_once(out, end=EPOCH)
    assert replay_run(out).is_equal, overrides


def test_a_stopped_run_resumes_with_another_number_of_workers(ranks: Any, tmp_path: Path) -> None:
    out, overrides = tmp_path / "run", ["sync=async", "model.norm=batch"]
    paused = ranks(2, train_with_pauses, overrides, out, 9)
    assert all(isinstance(each, Paused) for each in paused)
    position = paused[0].samples
    assert 0 < position < EPOCH
    result, *_ = ranks(3, train_with_pauses, overrides, out, None, True)
    assert isinstance(result, Result)
    assert_each_sample_is_pushed_once(out)
    assert replay_run(out).is_equal
    # From a checkpoint, if the beginning of the log is lost.
    lines = (out / "order.jsonl").read_text().splitlines(keepends=True)
    (out / "order.jsonl").write_text("torn\n" + "".join(lines[1:]))
    assert replay_run(out).begin == position
    (out / "order.jsonl").write_text("")
    with pytest.raises(ConfigError, match="there is no order log"):
        replay_run(out)


def test_a_bad_label_ends_all_ranks_with_one_line(ranks: Any, tmp_path: Path) -> None:
    outcomes = ranks.outcomes(2, train_with_a_bad_label, tmp_path / "run")
    assert all(outcome.exit_code != 0 for outcome in outcomes)
    assert sum("its label is 12, expected 0 to 9" in each.output for each in outcomes) == 1


def train_with_a_bad_label(out: Path) -> None:
    from allstep import data

    real = data.ArraySource

    class Mislabelled(real):  # type: ignore[misc, valid-type]
        def __init__(self, images: Any, numbers: Any, **more: Any) -> None:
            numbers = numbers.copy()
            numbers[17] = 12
            super().__init__(images, numbers, **more)

    data.ArraySource = Mislabelled
    train_with_pauses(["sync=async"], out)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["sync=async", "model.norm=sync"], "model.norm=sync and sync=async exclude each other"),
        (["sync=stale:2", "shares=[3,1]"], "a fast worker processes more anyway"),
        (["sync=async", "ema.decay=0.9"], "ema.decay and sync=async exclude each other"),
        (["sync=async", "precision=float16"], "a loss scale is common to all workers"),
        (["sync=async", "noise_scale=true"], "the noise scale and sync=async exclude"),
        (["sync=async", "optimizer.noise=0.1"], "gradient noise and sync=async exclude"),
        (["sync=async", "sync.correct=lr"], "the learning rate is scaled twice"),
        (["sync=async", "share_weights=true"], "share_weights=true and sync=async exclude"),
        (["sync=async", "sync.alpha=0.3"], "sync=async has no center: omit it, or set"),
        (["sync=elastic:4", "sync.correct=delay"], "workers push differences of weights"),
        (["sync=elastic:4", "sync.scale=false"], "sync.scale=False is for pushes of gradients"),
        (["sync=elastic:4", "model.norm=ghost"], "model.norm=ghost and sync=elastic:4 exclude"),
    ],
)
def test_what_does_not_fit_is_an_error(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_config(read_config("digits", overrides), 2)


def test_replacements_and_wrong_numbers_are_errors() -> None:
    with pytest.raises(ConfigError, match="sync=async: lost workers cannot be replaced yet"):
        check_replacements(read_config("digits", ["sync=async"]))
    # Fewer workers are possible.
    check_elastic(read_config("digits", ["sync=async"]), 2, [1, 2])
    with pytest.raises(ConfigError, match="use sync=server"):
        read_config("digits", ["sync=stale:0"])
    with pytest.raises(ConfigError, match="did you mean 'elastic'"):
        read_config("digits", ["sync=elastc:8"])
    for alpha in ("0", "1.5"):
        with pytest.raises(ConfigError, match=r"sync\.alpha"):
            read_config("digits", ["sync=elastic:8", f"sync.alpha={alpha}"])


def test_only_an_asynchronous_run_has_something_to_replay(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(read_config("digits", []).resolved(1).to_yaml())
    elastic = read_config("digits", ["sync=elastic:4"]).resolved(1)
    (tmp_path / "elastic").mkdir()
    (tmp_path / "elastic" / "config.yaml").write_text(elastic.to_yaml())
    with pytest.raises(ConfigError, match="a run with sync=elastic:4 cannot be replayed: the"):
        replay_run(tmp_path / "elastic")
    with pytest.raises(ConfigError, match="a run with sync=allreduce has no order log"):
        replay_run(tmp_path)
    entry = order_file.LoggedRound(
        0, 64, 64, {0: 64}, {0: 1}, ((0, 0, 64, 64, 0, 1, (0.1,), False),)
    )
    config = read_config("digits", ["sync=async"]).resolved(1)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    order_file.append(tmp_path, entry)
    assert order_file.read(tmp_path) == [entry]
    with pytest.raises(CheckpointError, match="has no complete checkpoint to compare with"):
        replay_run(tmp_path)


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ("server", "server: every worker waits for all others at every step"),
        (
            "async",
            "async: no worker waits for another one; 2 parties push 32 samples each;"
            " learning rate of a push: lr x 32/64",
        ),
        (
            "stale:2",
            "stale:2: a worker waits before a push that would make another's gradient older"
            " than 2 rounds, which is 4 pushes; 2 parties push 32 samples each",
        ),
        ("clock:1", "clock:1: a worker waits while it is more than 1 step ahead of the slowest"),
        (
            "lazy:4",
            "lazy:4: no worker waits for another one, and each pushes the sum of 4 steps;"
            " 2 parties push 128 samples each; learning rate of a push: lr x 128/64",
        ),
        (
            "elastic:8",
            "elastic:8: no worker waits for another one; after 8 steps of its own a worker and the"
            " center move toward each other; 2 parties; each moves 0.9/2 of the distance; a step"
            " has 32 samples and the learning rate lr",
        ),
    ],
)
def test_the_banner_states_who_waits(sync: str, expected: str) -> None:
    config = read_config("digits", [f"sync={sync}", "batch=64"]).resolved(2)
    assert sync_line(config, 2).startswith(expected)


def test_the_banner_names_hosts_as_parties() -> None:
    config = read_config("digits", ["sync=local:4"]).resolved(4)
    text = "local:4: each of 2 hosts trains alone for 4 steps, whose workers wait for each other"
    assert sync_line(config, 4, num_hosts=2).startswith(text)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_worker_does_not_stop_the_others(tmp_path: Path, victim: int) -> None:
    """It dies in the first epoch; the others finish the epoch, then continue as a smaller world."""
    out = tmp_path / "run"
    overrides = [*SHORT, "sync=async", "model.norm=batch", "epochs=3"]
    fault = f"kill@rank={victim},step=10"
    done = run("train", "digits", *overrides, "--workers", 3, "--fault", fault, "--out", out)
    assert done.code == 0, done.out + done.err
    lines = [line for line in done.out.splitlines() if f"lost rank {victim} on" in line]
    assert len(lines) == 1 and "killed by signal 9 (SIGKILL)" in lines[0]
    assert f"2 workers continue from sample {EPOCH:,}" in lines[0]
    assert_each_sample_is_pushed_once(out, end=3 * EPOCH)
    record = runlog.read(out / "run.jsonl")
    assert [each["samples"] for each in record.evals if each["part"] == "validation"] == [
        EPOCH,
        2 * EPOCH,
        3 * EPOCH,
    ]
    replayed = replay_run(out)
    assert replayed.is_equal and replayed.parties == 3


def test_checks_of_single_steps_are_synchronous() -> None:
    asynchronous = read_config("digits", ["sync=stale:2", "sync.correct=delay"]).resolved(1)
    assert synchronous(asynchronous) == read_config("digits", []).resolved(1)
    server = read_config("digits", ["sync=server"]).resolved(1)
    assert synchronous(server) is server


def test_a_model_whose_layers_communicate_cannot_push() -> None:
    config = read_config("digits", ["sync=async"]).resolved(2)
    check_pushes(config, torch.device("cpu"), layers_communicate=False)
    with pytest.raises(ConfigError, match="a norm over the samples of all workers"):
        check_pushes(config, torch.device("cpu"), layers_communicate=True)
    with pytest.raises(ConfigError, match="available on CPUs only so far"):
        check_pushes(config, torch.device("meta"), layers_communicate=False)
