"""Predictions of published measurements, and of a user's own series."""

import json
import re
from pathlib import Path
from time import perf_counter

import pytest

from allstep.cli.planning.plan_speed import plan
from allstep.costs.speed import Speed
from allstep.errors import ConfigError
from allstep.plan.models import layers_of
from allstep.plan.published_report import as_json, as_text
from allstep.plan.published_runs import published_runs
from allstep.plan.published_table import GUESS, Errors, Point, points_of, summary
from allstep.plan.read_series import read_series
from allstep.plan.setting import Cluster, Policy, profile_from_speed
from allstep.plan.simulator import step
from allstep.plan.transports import read_link

PLANNER = Path(__file__).parents[2] / "docs" / "planner.md"
SERIES = """
- name: K80 x 8, Inception V3, servers
  source: TensorFlow benchmark page, May 2017
  model: inception_v3
  batch_per_worker: 64
  alone: 29.7
  host: 229
  workers_per_host: 8
  link: 10Gbit
  transport: grpc
  inside: pcie-k80
  policy: {servers: hosts, sum_in_host: true}
  points: {2: 459, 4: 902, 8: 1783}
"""


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return points_of(published_runs())


def errors(points: list[Point], name: str) -> Errors:
    return next(each for each in summary(points) if each.name.startswith(name))


def test_larger_runs_are_predicted_from_the_smallest_on_several_hosts(points: list[Point]) -> None:
    found = errors(points, "3:")
    assert found.number == 29
    assert found.median <= 0.055
    assert found.within_tenth >= 26
    assert found.worst <= 0.2
    guess = errors(points, GUESS)
    assert found.within_tenth > guess.within_tenth
    assert found.worst < guess.worst


def test_one_table_of_constants_predicts_allreduce(points: list[Point]) -> None:
    found = errors(points, "1: one worker and the kind of transport, allreduce")
    assert found.number == 31
    assert found.median <= 0.05
    assert found.within_tenth >= 25


def test_efficiencies_are_those_that_the_sources_state(points: list[Point]) -> None:
    """A wrong digit in the data changes an efficiency that the source prints."""
    stated = {
        ("Horovod, RDMA 25 Gbit/s: vgg16", 128): 0.68,
        ("Horovod, TCP 40 Gbit/s: resnet101", 16): 0.89,
        ("Goyal et al., 50 Gbit/s: resnet50", 32): 0.86,
        ("K80, servers: inception_v3", 8): 0.938,
        ("K80, servers: resnet50", 8): 0.818,
        ("K80, servers: resnet152", 8): 0.790,
        ("Cray XC50, servers: inception_v3", 128): 0.52,
        ("V100, cloud 25 Gbit/s, float16 gradients: resnet50", 16): 0.80,
    }
    found = {(each.run.name, each.hosts): each.efficiency for each in points}
    for key, efficiency in stated.items():
        assert found[key] == pytest.approx(efficiency, abs=0.006), key
    assert all(each.run.source for each in points)


def test_the_page_has_the_table_that_the_command_prints(points: list[Point]) -> None:
    tables = [line for line in as_text(points).splitlines() if line.startswith("|")]
    page = PLANNER.read_text().splitlines()
    assert [line for line in tables if line not in page] == []


def test_json_has_every_point(points: list[Point]) -> None:
    found = json.loads(as_json(points))
    assert len(found["points"]) == len(points) == 55
    assert found["points"][0]["errors"]["level 1"] == pytest.approx(0.0, abs=0.01)


def test_thousands_of_workers_take_no_time() -> None:
    profile = profile_from_speed(layers_of("resnet152"), 32, 82.7)
    link, inside = read_link("10Gbit/25us"), Speed(4e-6, 35e9, float("inf"))
    step(profile, Cluster(512, 8, link, inside, 0.02), Policy())
    started = perf_counter()
    for _ in range(10):
        step(profile, Cluster(512, 8, link, inside, 0.02), Policy())
    assert perf_counter() - started < 10 * 0.05  # promised: 0.01 s


# Series of the user


def test_a_series_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published series, written as a file, is predicted as the built-in one is."""
    file = tmp_path / "own.yaml"
    file.write_text(SERIES)
    own = points_of(read_series(file))
    built_in = [
        each
        for each in points_of(published_runs())
        if each.run.name == "K80, servers: inception_v3"
    ]
    assert [each.errors for each in own] == [each.errors for each in built_in]
    plan([str(file)], published=True)
    assert "| K80 x 8, Inception V3, servers |     8 |" in capsys.readouterr().out
    # The page describes the format with the same example.
    assert SERIES.strip() in PLANNER.read_text()


def test_layers_instead_of_a_model(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    text = SERIES.replace("model: inception_v3", "layers: [[1000000, 2.0e+9], [500000, 1.0e+9]]")
    file.write_text(text)
    (run,) = read_series(file)
    assert [each.parameters for each in run.layers] == [1_000_000, 500_000]


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("  alone: 29.7", "  alon: 29.7", "unknown field alon; did you mean 'alone'?"),
        ("  alone: 29.7\n", "", "the field alone is missing"),
        ("alone: 29.7", "alone: fast", "alone: expected a number above 0, found 'fast'"),
        ("10Gbit", "10 parsecs", "link '10 parsecs': expected a rate"),
        ("grpc", "pigeon", "transport: 'pigeon' is unknown"),
        ("inception_v3", "inception", "model: 'inception' is unknown; did you mean"),
        ("{2: 459, ", "{1: 229, 2: 459, ", "points: expected hosts: samples/s, from 2 hosts on"),
        ("459", ".inf", "points.2: expected a number above 0, found inf"),
        ("  model: inception_v3\n", "", "expected one of model and layers"),
        ("  model: inception_v3", "  layers: [[1, 2, 3]]", "layers: expected [parameters, FLOP"),
        ("sum_in_host: true", "sum_in_host: 3", "policy.sum_in_host: expected true or false"),
        ("sum_in_host: true", "algorithm: rings", "policy.algorithm: 'rings' is unknown; did you"),
        ("workers_per_host: 8", "workers_per_host: 0", "expected a whole number from 1 to"),
    ],
)
def test_a_wrong_series_names_series_and_field(
    tmp_path: Path, before: str, after: str, complaint: str
) -> None:
    file = tmp_path / "own.yaml"
    assert before in SERIES
    file.write_text(SERIES.replace(before, after))
    with pytest.raises(ConfigError, match=r"series 1 \(K80 x 8") as caught:
        read_series(file)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "name: x", "- 5", "- [1, 2]", "- {}", "[]"])
def test_a_file_without_series(tmp_path: Path, text: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        read_series(file)


def test_wrong_use_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        plan([str(tmp_path / "none.yaml")], published=True)
    with pytest.raises(
        ConfigError, match="expected one recipe or config file, found none; or --published"
    ):
        plan()


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("10Gbit/25us", Speed(25e-6, 1.25e9, float("inf"))),
        ("1GB/s", Speed(10e-6, 1e9, float("inf"))),
        ("100Mbit", Speed(10e-6, 12.5e6, float("inf"))),
        ("2.5Gbit/s/1ms", Speed(1e-3, 312.5e6, float("inf"))),
    ],
)
def test_links(text: str, speed: Speed) -> None:
    found = read_link(text)
    assert (found.latency, found.bandwidth) == pytest.approx((speed.latency, speed.bandwidth))


@pytest.mark.parametrize("text", ["", "fast", "0Gbit", "10", "-1Gbit", "10Gbit/", "1e400Gbit"])
def test_a_link_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a rate and perhaps a latency"):
        read_link(text)
