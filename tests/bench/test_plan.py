"""`allstep bench plan`: really run once, with two ranks; predictions and verdicts on made-up figures."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from allstep.bench.plan import shaped_hosts
from allstep.bench.plan.configurations import (
    CONFIGURATIONS,
    WIRE,
    Configuration,
    Layer,
    chosen,
    predict,
    profile_of,
    sleeping_layers,
)
from allstep.bench.plan.result import PlanResult, PlanRow
from allstep.bench.plan.sleeping import model
from allstep.bench.plan.sleeping import sleeping_layers as as_model
from allstep.cli.app import app
from allstep.models.by_name import make_model
from support.hosts import why_not

KB, MB = 1 << 10, 1_000_000
PLAIN = Configuration(2, 1, 100, 0, MB)

layers = st.lists(
    st.tuples(st.integers(1, 10**8), st.floats(1e-3, 1.0), st.floats(1e-3, 1.0)),
    min_size=1,
    max_size=12,
)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.timeout(170)
def test_predicted_steps_are_measured_on_two_hosts(tmp_path: Path) -> None:
    """How near they are depends on the load of this machine: `met` is no part of the test. That
    the step waits for a link of this rate, and not longer than twice, is."""
    if reason := why_not("tc"):
        pytest.skip(reason)
    file = tmp_path / "plan.json"
    options = ["--workers", "2", "--steps", "3", "--json", str(file)]
    outcome = CliRunner().invoke(app, ["bench", "plan", *options])
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads(file.read_text())["rows"]
    assert [(row["hosts"], row["workers_per_host"], row["mbit"]) for row in rows] == [
        (2, 1, 100)
    ] * 2
    for row in rows:
        assert len(row["seconds"]) == 3
        # Without the link, the layers alone sleep 0.28 s.
        assert 0.9 * row["predicted"] < row["measured"] < 2 * row["predicted"], row
        assert 0 < row["message"] < 0.1
        assert 0 < row["cpu"] < 1
    assert "configurations have a verdict" in outcome.output


def test_without_root_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaped_hosts.os, "geteuid", lambda: 1000)
    outcome = CliRunner().invoke(app, ["bench", "plan"])
    message = str(outcome.exception) or outcome.output
    assert "only root can make; expected user 0, found 1000" in message
    assert "\n" not in message.strip()


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaped_hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(shaped_hosts.shutil, "which", lambda name, path: name != "tc" or None)
    with pytest.raises(Exception, match="found no tc: install iproute2"):
        shaped_hosts.check_possible()


# Predictions


@given(layers)
def test_layers_and_profiles_are_the_same_thing(given: list[Layer]) -> None:
    found = sleeping_layers(profile_of(given))
    assert len(found) == len(given)
    for one, other in zip(found, given, strict=True):
        assert one == pytest.approx(other, abs=1e-9)


def test_a_step_by_hand() -> None:
    """Two hosts: 4 MB on the wire, from the end of the last layer's backward pass on."""
    rate = WIRE * 100e6 / 8
    # A bucket each: its header is two messages, and so is its sum by the butterfly or the ring.
    found = predict(PLAIN, 1e-3).seconds
    assert found == pytest.approx(4 * 0.02 + 0.05 + 4 * (4e-3 + MB / rate), rel=1e-3)
    # One bucket: the ring's chunks of 2 MB travel in two segments.
    one = Configuration(2, 1, 100, 0, 25 << 20)
    assert predict(one, 1e-3).seconds == pytest.approx(0.28 + 6e-3 + 4 * MB / rate, rel=1e-3)


def test_the_burst_passes_at_once() -> None:
    """With 2 hosts the first bucket then ends before the second is ready: the link is idle, and
    refills in that time."""
    rate = WIRE * 100e6 / 8
    for hosts in (2, 4, 8):
        each = Configuration(hosts, 1, 100, 512 * KB, MB)
        saved = predict(each, 0.0, count_burst=False).seconds - predict(each, 0.0).seconds
        assert saved == pytest.approx(WIRE * 512 * KB / rate)
    # A link that is faster than the computation does not limit the step.
    fast = Configuration(2, 1, 100_000, 512 * KB, MB)
    assert predict(fast, 0.0).seconds == pytest.approx(0.28, rel=0.01)


def test_the_slow_worker_counts() -> None:
    slow = Configuration(4, 1, 1_000_000, 0, MB, slow=1.5)
    assert predict(slow, 0.0).seconds == pytest.approx(1.5 * 0.28, rel=0.01)
    assert "1.5 times slower" in slow.name


def test_ten_configurations_have_a_target() -> None:
    judged = [each for each in CONFIGURATIONS if each.judged]
    assert len(judged) == len(set(judged)) == 10
    assert {each.per_host for each in judged} == {1, 2}
    assert {each.size for each in judged} == {2, 4, 8}
    assert len({each.mbit for each in judged}) == 2
    assert any(each.slow > 1 for each in judged)
    assert len({each.limit >= 25 << 20 for each in judged}) == 2
    assert judged == chosen(8)


# Verdicts


def row(error: float, cpu: float = 0.1, *, judged: bool = True) -> PlanRow:
    each = Configuration(2, 1, 100, 0, MB, judged=judged)
    return PlanRow(each, 1 + error, 2.0, (1.0, 0.9, 1.1), cpu)


def test_verdicts() -> None:
    assert [row(error).met for error in (0.0, 0.09, -0.09, 0.11, -0.11)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    busy, extra = row(0.5, cpu=0.31), row(0.5, judged=False)
    assert busy.met is extra.met is None
    assert busy.verdict == "none: CPU above 30%"
    result = PlanResult((row(0.02), row(-0.08), row(0.03), busy, extra), 1e-4, 3, 2)
    assert result.median_error == pytest.approx(0.03)
    assert "3 of 4 configurations have a verdict; median error 3.0% (target 5%: met)" in (
        result.summary()
    )
    assert "largest 8.0%; repeat" in result.summary()
    none = PlanResult((busy,), 1e-4, 3, 2)
    assert none.median_error is None
    assert "0 of 1 configurations have a verdict; repeat" in none.summary()


# The model


@pytest.mark.usefixtures("processes")
def test_layers_sleep_and_have_real_gradients() -> None:
    made = as_model([(4000, 0.02, 0.03), (400, 0.01, 0.04)], slow=1.5)
    assert [each.numel() for each in made.parameters()] == [1000, 100]
    began = time.perf_counter()
    out = made(torch.zeros(1, requires_grad=True))
    between = time.perf_counter()
    (3 * out).sum().backward()
    ended = time.perf_counter()
    # No upper limits: this machine may be busy.
    assert between - began >= 1.5 * 0.03
    assert ended - between >= 1.5 * 0.07
    for parameter in made.parameters():
        assert parameter.grad is not None
        assert torch.all(parameter.grad == 3)


@pytest.mark.usefixtures("processes")
def test_it_is_a_model_for_train() -> None:
    options = {"layers": [[4000, 0.01, 0.02]], "samples": 10}
    name = f"{model.__module__}:model"
    made = make_model(
        name, num_classes=7, shape=(3, 8, 8), norm=torch.nn.BatchNorm2d, options=options
    )
    began = time.perf_counter()
    assert made(torch.zeros(30, 3, 8, 8)).shape == (30, 7)
    assert time.perf_counter() - began >= 0.03
    assert math.isclose(sum(each.numel() for each in made.parameters()), 1000 + 4 * 7)
