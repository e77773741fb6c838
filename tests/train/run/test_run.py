"""Complete runs on the digits: same result for any number of workers, events, bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import allstep
from allstep import comm, data, runlog
from allstep.comm.group import agree
from allstep.data import Batch, Loader
from allstep.train import read_config
from allstep.train.health.stop_request import Stopping
from allstep.train.run.loop import Run, train
from allstep.train.run.setup import make_job
from allstep.train.run.train_request import TrainRequest
from allstep.train.run.worker import work
from allstep.train.score.evaluate import evaluate
from allstep.train.task.classification import Classification
from allstep.train.watch.callback import Callbacks
from allstep.train.watch.events import Result
from allstep.train.watch.record_callback import Record
from support.array_sources import Arrays

# float32, not auto: runs are compared with each other, on every CPU.
SHORT = ["precision=float32", "epochs=2", "data.validation=50", "log_every=7"]


def short_run(overrides: list[str]) -> tuple[Result, list[tuple[int, list[int]]], list[int], Path]:
    """Train a run. Return what this rank saw of it: position and samples of each training batch,
    samples of the test."""
    world = allstep.init()
    steps: list[tuple[int, list[int]]] = []
    test: list[int] = []
    original = Loader.batches

    def spy(loader: Loader, *args: int) -> Any:
        batch: Batch
        for batch in original(loader, *args):
            if loader.seed is not None:
                steps.append((batch.position, batch.samples.tolist()))
            elif loader.numbers is None:
                test.extend(batch.samples.tolist())
            yield batch

    Loader.batches = spy  # type: ignore[method-assign]
    out = Path.cwd() / "out"
    callbacks = [Record(runlog.RunLog(out / "run.jsonl"))] if world.rank == 0 else []
    result = train(read_config("digits", [*SHORT, *overrides]), world, out, callbacks)
    return result, steps, test, out


def merged(by_rank: list[list[tuple[int, list[int]]]]) -> list[tuple[int, list[int]]]:
    return [
        (shares[0][0], [number for _, samples in shares for number in samples])
        for shares in zip(*by_rank, strict=True)
    ]


@pytest.mark.parametrize("overrides", [[], ["batch=50", "accumulation=3"]])
def test_two_workers_do_what_one_does(ranks: Any, overrides: list[str]) -> None:
    ((alone, alone_steps, alone_test, _),) = ranks(1, short_run, overrides)
    both = ranks(2, short_run, overrides)
    assert merged([steps for _, steps, _, _ in both]) == alone_steps
    for result, _, _, _ in both:
        assert result.test.accuracy == pytest.approx(alone.test.accuracy, abs=0.006)
        assert result.test.loss == pytest.approx(alone.test.loss, rel=0.01)
        assert result.validation.loss == pytest.approx(alone.validation.loss, rel=0.01)
        assert result.test.count == 360
    assert (
        sorted(number for _, _, test, _ in both for number in test)
        == sorted(alone_test)
        == list(range(360))
    )


def test_validation_samples_are_never_trained_on(ranks: Any) -> None:
    ((_, steps, _, _),) = ranks(1, short_run, [])
    seen = {number for _, samples in steps for number in samples}
    assert len(seen) == 1437 - 50
    assert sum(len(samples) for _, samples in steps) == 2 * len(seen)


def test_the_same_seed_gives_the_same_bits(ranks: Any) -> None:
    first, second = ranks(2, short_run, [])[0][0], ranks(2, short_run, [])[0][0]
    assert (first.test, first.validation) == (second.test, second.validation)
    other = ranks(2, short_run, ["seed=1"])[0][0]
    assert other.test.loss != first.test.loss


def test_the_record_has_what_happened(ranks: Any) -> None:
    (result, steps, _, out), _ = ranks(2, short_run, [])
    record = runlog.read(out / "run.jsonl")
    assert record.start["world"]["size"] == 2
    assert record.start["config"]["batch"] == 64
    assert record.start["parameters"] * 4 == record.start["bytes"]
    assert record.start["flop_per_sample"] > 0
    assert record.start["data"]["train"] == 1387
    assert [step["samples"] for step in record.steps][-1] == 2 * 1387
    for step in record.steps:
        times = [step[phase] for phase in ("input", "compute", "wait", "update")]
        assert all(len(by_rank) == 2 for by_rank in times)
        assert sum(by_rank[0] for by_rank in times) == pytest.approx(step["seconds"], rel=1e-6)
    assert [line["part"] for line in record.evals] == ["validation", "validation", "train", "test"]
    assert record.end is not None
    assert record.end["test"]["accuracy"] == result.test.accuracy
    assert len(steps) == 2 * 22


class Damaged(Arrays):
    """A source in which some samples of each split cannot be read."""

    def __init__(self, images: Any, labels: Any, **_: Any) -> None:
        super().__init__(images, labels, bad=DAMAGED)
        self.classes = tuple("0123456789")


DAMAGED = (3, 70, 71, 200, 350)


def run_on_damaged_data(overrides: list[str]) -> Result:
    world = allstep.init()
    data.ArraySource = Damaged  # type: ignore[misc, assignment]
    out = Path.cwd() / "out"
    callbacks = [Record(runlog.RunLog(out / "run.jsonl"))] if world.rank == 0 else []
    return train(read_config("digits", [*SHORT, *overrides]), world, out, callbacks)


@pytest.mark.parametrize("size", [1, 2])
def test_bad_samples_are_skipped_listed_and_counted_over_all_ranks(ranks: Any, size: int) -> None:
    """Each is bad in the training data, which two splits share, and in the test data."""
    result = ranks(size, run_on_damaged_data, [])[0]
    assert result.test.count == 360 - len(DAMAGED)
    lists = {
        path.name: path.read_text().splitlines() for path in result.out.glob("quarantine*.jsonl")
    }
    assert sum(map(len, lists.values())) == result.num_bad
    test = [
        json.loads(line)["number"]
        for name, lines in lists.items()
        if "test" in name
        for line in lines
    ]
    rest = [
        json.loads(line)["number"]
        for name, lines in lists.items()
        if "test" not in name
        for line in lines
    ]
    assert sorted(test) == sorted(set(rest)) == list(DAMAGED)
    record = runlog.read(result.out / "run.jsonl")
    assert record.events[0]["num_bad"] == len(DAMAGED)
    assert record.end is not None
    assert record.end["num_bad"] == result.num_bad


@pytest.mark.parametrize("override", ["data.strict=true", "data.budget=0"])
def test_strict_and_budget_end_the_run(ranks: Any, override: str) -> None:
    outcomes = ranks.outcomes(2, run_on_damaged_data, [override])
    assert all(outcome.exit_code != 0 for outcome in outcomes)
    assert any("made to be bad" in outcome.output for outcome in outcomes)


def diverge() -> None:
    world = allstep.init()
    train(
        read_config(
            "digits",
            [
                *SHORT,
                "optimizer.lr=1e9",
                "optimizer.bias_lr=1e9",
                "schedule.warmup=0",
                "precision=float32",
            ],
        ),
        world,
        Path(),
    )


def test_a_loss_that_is_not_finite_ends_the_run(ranks: Any) -> None:
    outcomes = ranks.outcomes(2, diverge)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "the loss is nan at step" in outcomes[0].output


def break_a_norm() -> None:
    world = allstep.init()
    job = make_job(
        read_config("digits", [*SHORT, "model.norm=batch"]).resolved(world.size), world, Path()
    )
    run = Run(job, Callbacks([]), Stopping(None))
    norm = next(
        module for module in job.trainer.model.modules() if isinstance(module, torch.nn.BatchNorm2d)
    )
    norm.running_var[1] = torch.inf  # the loss in training does not see it
    run._evaluate()


def test_a_norm_that_is_not_finite_ends_the_run_before_its_evaluation(ranks: Any) -> None:
    outcomes = ranks.outcomes(2, break_a_norm)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert "running_var is not finite after step 0" in outcomes[0].output
    assert "what to try, most promising first" in outcomes[0].output


def evaluate_share(n: int) -> tuple[float, float, int]:
    world = allstep.init()
    torch.manual_seed(0)
    images, labels = torch.randn(n, 5).numpy(), torch.arange(n).numpy() % 3
    loader = Loader(Arrays(images, labels), batch=4, world=world, seed=None)
    score = evaluate(torch.nn.Linear(5, 3), loader, lambda x: x, Classification(3))
    return score.loss, score.accuracy, score.count


@pytest.mark.parametrize("n", [1, 5, 13])
def test_evaluation_counts_each_sample_once(ranks: Any, n: int) -> None:
    (alone,) = ranks(1, evaluate_share, n)
    for together in ranks(3, evaluate_share, n):
        assert together == pytest.approx(alone)
        assert together[2] == n


def try_to_work(asked: TrainRequest) -> Result:
    return work(asked)


def test_a_worker_makes_the_run_folder(ranks: Any, tmp_path: Path) -> None:
    results = ranks(
        2,
        try_to_work,
        TrainRequest("digits", ["epochs=1", "batch_per_worker=20"], out=tmp_path / "out"),
    )
    assert results[0].out == results[1].out == tmp_path / "out"
    config = read_config(str(tmp_path / "out" / "config.yaml"))
    assert (config.batch, config.batch_per_worker) == (40, None)
    assert runlog.read(tmp_path / "out" / "run.jsonl").end is not None


def test_bad_input_ends_all_ranks_alike(ranks: Any, tmp_path: Path) -> None:
    def end_like_the_command(asked: TrainRequest) -> None:
        try:
            work(asked)
        except allstep.UserError as error:
            print(f"allstep: {error}")
            raise SystemExit(error.exit_code) from None

    outcomes = ranks.outcomes(2, end_like_the_command, TrainRequest("digits", data=tmp_path))
    assert [outcome.exit_code for outcome in outcomes] == [2, 2]
    assert "expected train-images-idx3-ubyte" in outcomes[0].output
    assert outcomes[1].output == ""


def fail_on(rank: int) -> None:
    world = allstep.init()

    def act() -> int:
        if world.rank == rank:
            raise allstep.UserError("no such thing")
        return 1

    try:
        agree.everyone(world, act)
    except allstep.UserError as error:
        print(error)
        raise SystemExit(2) from None
    finally:
        comm.shutdown()


def test_what_is_wrong_on_one_host_ends_all(ranks: Any) -> None:
    outcomes = ranks.outcomes(2, fail_on, 1, hosts=["here", "there"])
    assert [outcome.exit_code for outcome in outcomes] == [2, 2]
    assert "on there: no such thing" in outcomes[0].output
