"""Divergence: what `LossWatch` detects, against slow rules over all losses; and the message."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from allstep.train import read_config
from allstep.train.config.check_config import check_config
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.config.validate_keys import validated
from allstep.train.health.divergence import (
    Circumstances,
    Diverged,
    LossWatch,
    Spike,
    Suspect,
    explain,
    remedies,
)

FALLING = [2.3 * 0.97**step for step in range(100)]  # to 0.11


def watched(losses: list[float]) -> list[Spike | Diverged]:
    watch = LossWatch()
    return [found for loss in losses if (found := watch.see(loss, 1)) is not None]


def config(optimizer: dict[str, object] | None = None, **values: object) -> ResolvedConfig:
    usual = {"recipe": "test", "data": {"name": "digits"}, "batch": 128, "epochs": 20}
    return validated(
        {**usual, "optimizer": {"base_batch": 128, **(optimizer or {})}, **values}
    ).resolved(1)


KNOWN = Circumstances(samples=103_936, epoch=2.17, lr=0.8, batch=128)


def test_a_good_run_gives_no_event() -> None:
    assert watched(FALLING) == []
    assert (
        watched([2.3] * 10 + [0.001] * 50 + [0.1, 1.0] + [0.001] * 50) == []
    )  # one hard sample at a low loss


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_ends_the_run_at_once(loss: float) -> None:
    (found,) = watched([*FALLING, loss])
    assert isinstance(found, Diverged)
    assert found.step == 101
    assert str(found).startswith(f"the loss is {loss} at step 101; the best so far was 0.1")
    (first,) = watched([loss])
    assert str(first) == f"the loss is {loss} at step 1"


def test_a_spike_that_comes_back_is_an_event() -> None:
    (found,) = watched([*FALLING, 5.0, 9.0, 3.0, 0.2, 0.1])
    assert isinstance(found, Spike)
    assert (found.step, found.steps, found.peak) == (101, 3, 9.0)
    assert str(found).startswith("the loss rose to 9 at step 101 (best so far 0.1")
    assert str(found).endswith(") and recovered after 3 steps")


def test_a_spike_that_stays_is_the_end() -> None:
    assert watched([*FALLING, *[5.0] * 50]) == []
    (found,) = watched([*FALLING, *[5.0] * 51])
    assert isinstance(found, Diverged)
    assert (found.step, found.since, found.loss) == (151, 101, 5.0)
    assert "and it has been beyond 10 times that since step 101" in str(found)


def test_a_loss_beyond_all_hope_is_the_end_at_once() -> None:
    found, *_ = watched([2.4, 2.3, 6e25, 1e9, 2.3])
    assert isinstance(found, Diverged)
    assert (found.step, found.loss) == (3, 6e25)
    assert str(found).startswith("the loss is 6e+25 at step 3; the best so far was 2.3")
    assert str(found).endswith(": no model recovers from that")
    (spike,) = watched([2.4, 2.3, 1e6, 2.3])
    assert isinstance(spike, Spike)


def test_a_model_that_falls_back_to_guessing_is_found() -> None:
    assert isinstance(watched([*FALLING, *[math.log(10)] * 60])[0], Diverged)


def test_a_step_without_samples_gives_no_event() -> None:
    watch = LossWatch()
    assert watch.see(math.nan, 0) is None
    assert watch.see(2.0, 4) is None
    assert (watch.step, watch.best) == (2, pytest.approx(2.0))


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=200), st.integers(0, 200))
def test_a_watch_from_a_checkpoint_continues_alike(losses: list[float], cut: int) -> None:
    whole, part = LossWatch(), LossWatch()
    for number, loss in enumerate(losses):
        if number == cut:
            part = LossWatch(**json.loads(json.dumps(asdict(part), allow_nan=False)))
        assert whole.see(loss, 1) == part.see(loss, 1)


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=200))
def test_against_the_whole_history(losses: list[float]) -> None:
    """Reference: means over all good losses, weighted by 0.9 per step."""
    watch, good, best, beyond = LossWatch(), [], math.inf, 0
    for loss in losses:
        found = watch.see(loss, 1)
        if good and loss > max(10 * best, good[0] / 2):
            beyond += 1
            assert isinstance(found, Diverged) == (beyond > 50)
            continue
        assert isinstance(found, Spike) == (beyond > 0)
        good.append(loss)
        weights = [0.9**age for age in range(len(good))][::-1]
        best = min(
            best, sum(w * each for w, each in zip(weights, good, strict=True)) / sum(weights)
        )
        assert watch.best == pytest.approx(best)
        beyond = 0


def keys(lines: list[str]) -> list[str]:
    return [line.split(":")[0] for line in lines]


def test_remedies_follow_the_facts() -> None:
    assert keys(remedies(KNOWN, config())) == ["optimizer.clip=1", "optimizer.lr=0.05"]
    assert keys(remedies(KNOWN, config(optimizer={"clip": 1.0, "lr": 0.2}))) == ["optimizer.lr=0.1"]
    assert keys(remedies(KNOWN, config(precision="float16")))[0] == "precision=bfloat16"
    noisy = config(optimizer={"noise": 0.1})
    assert "optimizer.noise=0" in keys(remedies(KNOWN, noisy))


def test_a_rate_that_was_scaled_up_wants_a_longer_warm_up() -> None:
    known = Circumstances(samples=1, epoch=0.1, lr=0.2, batch=512)
    assert (
        remedies(known, config(batch=512, schedule={"warmup": 0.5}))[0]
        == "schedule.warmup=5: the learning rate rises to 4 times that of base_batch 128 within 0.5 epochs"
    )
    assert keys(remedies(known, config(batch=512, epochs=8)))[0] == "schedule.warmup=2"
    assert keys(remedies(known, config(batch=512, schedule={"warmup": 5})))[0] == "optimizer.clip=1"
    long = config(batch=512, schedule={"warmup_kind": "none", "warmup": 6})
    assert keys(remedies(known, long))[0] == "schedule.warmup_kind=gradual"
    assert (
        keys(remedies(known, config(batch=512, optimizer={"scaling": "none"})))[0]
        == "optimizer.clip=1"
    )


@pytest.mark.parametrize("warmup", [0, 0.5])
def test_a_run_without_warm_up_gets_all_keys_for_one(warmup: float) -> None:
    """The kind has no effect if the length is 0, nor the length if the kind is none."""
    known = Circumstances(samples=1, epoch=0.1, lr=0.2, batch=512)
    none = config(batch=512, schedule={"warmup_kind": "none", "warmup": warmup})
    assert (
        remedies(known, none)[0]
        == "schedule.warmup_kind=gradual schedule.warmup=5: the learning rate is 4 times that of base_batch"
        " 128, from the first step on"
    )
    zero = config(batch=512, schedule={"warmup": 0})
    assert (
        remedies(known, zero)[0]
        == "schedule.warmup=5: the learning rate is 4 times that of base_batch 128, from the first step on"
    )


@pytest.mark.parametrize(
    "schedule",
    [
        {"warmup_kind": "none", "warmup": 0},
        {"warmup": 0},
        {"shape": "step", "milestones": (2, 9)},
        {"shape": "step", "warmup": 0},
        {"shape": "one-cycle"},
    ],
    ids=str,
)
def test_every_remedy_is_a_config_that_can_run(schedule: dict[str, object]) -> None:
    """Apply the keys of each line to the config of the run.

    A one-cycle has no warm-up, and the learning rate cannot fall within a warm-up.
    """
    asked = config(batch=4096, optimizer={"name": "sgd"}, schedule=schedule)
    for line in keys(remedies(Circumstances(samples=1, epoch=0.1, lr=0.2, batch=4096), asked)):
        values = asked.model_dump()
        for override in line.split():
            section, key, value = re.split("[.=]", override, maxsplit=2)
            values[section][key] = yaml.safe_load(value)
        check_config(validated(values), 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", "optimizer.name=lars optimizer.trust_coefficient=0.02"),
        ("adamw", "optimizer.name=lamb"),
    ],
)
def test_a_batch_far_above_the_base_wants_rates_by_layer(name: str, expected: str) -> None:
    """Expect the settings that docs/large-batch.md recommends.

    With the default coefficient of LARS, 0.001, the learning rate of SGD has almost no effect.
    """
    known = Circumstances(samples=1, epoch=0.1, lr=0.2, batch=4096)
    found = keys(remedies(known, config(batch=4096, optimizer={"name": name})))
    root = "optimizer.scaling=square-root"
    assert found[:3] == ["schedule.warmup=5", f"{expected} {root}", root]
    found = keys(
        remedies(known, config(batch=4096, optimizer={"name": name, "scaling": "square-root"}))
    )
    assert found[1] == expected
    for other in ("lars", "lamb"):
        found = keys(
            remedies(known, config(batch=4096, optimizer={"name": other, "scaling": "square-root"}))
        )
        assert not any(key.startswith(("optimizer.name", "optimizer.scaling")) for key in found)


def test_a_rate_far_above_the_recipes_is_named_first() -> None:
    recipe = read_config("digits")
    known = Circumstances(samples=64, epoch=0.1, lr=5.0, batch=64)
    bold = read_config("digits", ["optimizer.lr=5"]).resolved(1)
    assert recipe.optimizer.lr == 0.05
    assert remedies(known, bold)[0] == "optimizer.lr=0.05: the recipe's own lr; 5 is 100 times that"
    for overrides in (
        ["optimizer.lr=0.2"],
        ["optimizer.lr=5", "optimizer.base_batch=128"],
        ["optimizer=lars", "optimizer.lr=5"],
    ):
        assert not any(
            "recipe's own" in remedy
            for remedy in remedies(known, read_config("digits", overrides).resolved(1))
        )


def test_bad_input_comes_first() -> None:
    suspects = [Suspect(0, 5), Suspect(1, 17, "train.tar, member 17.jpg", is_finite=False)]
    known = Circumstances(samples=1, epoch=0.1, lr=0.2, batch=128, suspects=suspects)
    assert remedies(known, config(precision="float16"))[0].startswith(
        "inspect the samples 17: as input of the model they are not finite"
    )


def test_the_whole_message() -> None:
    suspects = [Suspect(number // 6, 100 + number, "a.tfrecord") for number in range(11)] + [
        Suspect(1, 7, "b.tfrecord, record 7", is_finite=False)
    ]
    known = Circumstances(
        103_936, 2.17, 0.8, 128, 3.1e5, suspects, Path("runs/a/checkpoints/000000100000")
    )
    assert (
        explain(Diverged(812, math.nan, 0.4123, 812), known, config(optimizer={"lr": 0.8}))
        == "the loss is nan at step 812; the best so far was 0.4123 (103,936 samples seen, epoch"
        " 2.17; lr 0.8, batch 128, gradient norm 3.1e+05)\n  samples of that step: 7"
        " (b.tfrecord, record 7) on rank 1, 100, 101, 102, 103, 104, 105, 106 and 4 more\n  what"
        " to try, most promising first:\n    inspect the samples 7: as input of the model they are"
        " not finite, so the data or data.mean, data.std are wrong\n    optimizer.clip=1: the"
        " gradient's norm was 3.1e+05\n    optimizer.lr=0.4: half of the present value\n  the last good"
        " checkpoint is kept: runs/a/checkpoints/000000100000"
    )
    assert explain(Diverged(1, math.inf, None, 1), KNOWN, config()).endswith(
        "no checkpoint was written before the divergence"
    )


@pytest.mark.parametrize(
    ("count", "batch", "expected"),
    [
        (1, 128, "samples of that step: 0 (x, row 0) on rank 0\n"),
        (
            3,
            128,
            (
                "samples of that step: 0 (x, row 0) on rank 0, 1 (x, row 1) on rank 0, 2 (x, row 2)"
                " on rank 1\n"
            ),
        ),
        (4, 128, "samples of that step: 0, 1, 2, 3\n"),
        (3, 3, "samples of that step: 0, 1, 2\n"),
        (9, 128, "samples of that step: 0, 1, 2, 3, 4, 5, 6, 7 and 1 more\n"),
    ],
)
def test_places_are_given_where_few_samples_are_suspect(
    count: int, batch: int, expected: str
) -> None:
    suspects = [Suspect(number // 2, number, f"x, row {number}") for number in range(count)]
    known = Circumstances(samples=1, epoch=0.1, lr=0.2, batch=batch, suspects=suspects)
    assert expected in explain(Diverged(1, math.inf, None, 1), known, config())
