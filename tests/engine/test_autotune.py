"""Autotune: the sweep on a clock of our own, and on real ranks, whose results must not change while
it goes on."""

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from allstep import engine
from allstep.engine import Kind, Op, Request
from allstep.engine.autotune import CANDIDATES, MB, MEASUREMENTS, Autotune, Log, read_autotune
from allstep.engine.request import RequestSpec, decode, encode
from allstep.errors import AllstepError, ConfigError
from support.ranks import Ranks

COLUMNS = [
    *("hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "cache_enabled"),
    *("cycle_time_ms", "tensor_fusion_threshold", "score"),
]


def ask(name: str, numel: int = 250) -> RequestSpec:
    return decode(encode(Request(Kind.ALLREDUCE, name, torch.empty(numel)), name))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == COLUMNS
        return list(reader)


def assert_table(path: Path, thresholds: list[float]) -> list[dict[str, str]]:
    """A row for each threshold in MB, in this order, and the best of them again.

    Other columns do not change.
    """
    *samples, best = rows(path)
    assert [float(row["tensor_fusion_threshold"]) for row in samples] == thresholds
    assert best == max(samples, key=lambda row: float(row["score"]))
    assert {tuple(row[name] for name in COLUMNS[:5]) for row in samples} == {
        ("0", "0", "0", "1", "1")
    }
    return samples


# The sweep


def test_the_fastest_threshold_wins_by_its_median(tmp_path: Path) -> None:
    """1,000 bytes take 10 us with 4 MB and 20 us with the others, which all have two measurements
    out of five that are quicker still."""
    clock = Clock()
    tuner = Autotune(warmup=2, steps=3, log=Log(str(tmp_path / "log.csv")), clock=clock)
    used = []
    for step in itertools.count():
        if tuner.is_done:
            break
        measurement = (step - 1) // 3
        slow = 10e-6 if tuner.fusion == 4 * MB else 1e-6 if measurement % 5 in (1, 3) else 20e-6
        clock.now += slow
        used.append(tuner.fusion)
        assert tuner.reduced([ask("x")]) == tuner.fusion
    assert len(used) == 1 + 3 * MEASUREMENTS * (2 + len(CANDIDATES)), (
        "the first operation only starts the clock"
    )
    assert list(dict.fromkeys(used)) == list(CANDIDATES)
    assert tuner.fusion == 4 * MB
    samples = assert_table(tmp_path / "log.csv", [0, 1, 2, 4, 8, 16, 32, 64])
    assert float(samples[3]["score"]) == pytest.approx(100, rel=1e-3), "bytes per microsecond"
    assert float(samples[0]["score"]) == pytest.approx(50, rel=1e-3)
    clock.now += 1
    assert tuner.reduced([ask("x")]) == 4 * MB, "afterwards nothing changes"
    assert len(rows(tmp_path / "log.csv")) == len(CANDIDATES) + 1


def test_a_measurement_ends_when_a_name_has_come_so_often() -> None:
    tuner = Autotune(candidates=(0, MB), warmup=0, steps=2)
    changes = [tuner.reduced([ask("a"), ask("b")]) == MB for _ in range(2 * MEASUREMENTS + 1)]
    assert changes == [False] * (2 * MEASUREMENTS) + [True]


def test_names_that_never_come_again_do_not_pile_up() -> None:
    tuner = Autotune(candidates=(0, MB), warmup=0, steps=2)
    for index in range(12_000):
        tuner.reduced([ask(f"allreduce.noname.{index}")])
    assert len(tuner._times) < 10_001
    for _ in range(2 * MEASUREMENTS):
        tuner.reduced([ask("allreduce.x")])
    assert tuner.fusion == MB, "a name that does come again still ends the sample"


# What is asked for


def test_variables(tmp_path: Path) -> None:
    assert read_autotune(0, 7, {}) is None
    assert read_autotune(0, 7, {"HOROVOD_AUTOTUNE": "0"}) is None
    assert read_autotune(1, 7, {"HOROVOD_AUTOTUNE": "1"}) is None
    fixed = read_autotune(
        0, 3 * MB, {"HOROVOD_AUTOTUNE": "1", "HOROVOD_FUSION_THRESHOLD": str(3 * MB)}
    )
    assert fixed is not None and fixed.fusion == 3 * MB
    for _ in range(1 + 10 * MEASUREMENTS * 4):
        assert fixed.reduced([ask("x")]) == 3 * MB
    assert fixed.is_done


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HOROVOD_AUTOTUNE": "yes"}, "HOROVOD_AUTOTUNE='yes' is not a number of at least 0"),
        (
            {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "0"},
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE=0: expected at least 1 step",
        ),
        (
            {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "-1"},
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES='-1' is not a number",
        ),
        (
            {"HOROVOD_AUTOTUNE_LOG": "/no/such/log.csv"},
            "HOROVOD_AUTOTUNE_LOG='/no/such/log.csv' cannot be written: No such",
        ),
        (
            {"HOROVOD_AUTOTUNE_LOG": "/dev/full"},
            "'/dev/full' cannot be written: No space left on device",
        ),
    ],
)
def test_wrong_variables(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_autotune(0, 0, {"HOROVOD_AUTOTUNE": "1", **variables})


def test_a_log_that_cannot_be_written_any_more_is_reported_once(
    tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tuner = Autotune(
        candidates=(0, MB, 2 * MB), warmup=0, steps=1, log=Log(str(folder / "log.csv"))
    )
    (folder / "log.csv").unlink()
    folder.rmdir()
    while not tuner.is_done:
        tuner.reduced([ask("x")])
    assert len(tuner.samples) == 3
    assert (
        capsys.readouterr().err.count(
            "cannot be written: No such file or directory; the log ends here"
        )
        == 1
    )


# On real ranks


def steps_until_done() -> tuple[list[int], list[tuple[int, int]]]:
    """Six tensors in a step, in another order on each rank. On rank 0: the threshold after each
    step; and, for each answer, the threshold and how many tensors were fused."""
    e = engine.start()
    rank, size = e.world.rank, e.world.size
    used, fused = [], []

    class Listener(engine.Hooks):
        def negotiated(self, asks: Any) -> None:
            if e._coordinator is not None:
                fused.append((e._coordinator.fusion, len(asks)))

    e.hooks = Listener()
    for step in range(400):
        numbers = list(range(6)) if rank % 2 == 0 else list(range(5, -1, -1))
        handles = {
            each: e.enqueue(
                Request(
                    Kind.ALLREDUCE,
                    f"allreduce.{each}",
                    torch.full((1000,), float(each + rank + step)),
                    op=Op.SUM,
                )
            )
            for each in numbers
        }
        for each, handle in handles.items():
            assert e.synchronize(handle).eq(size * (each + step) + size * (size - 1) / 2).all(), (
                step,
                each,
            )
        if e._coordinator is not None:
            used.append(e._coordinator.fusion)
        over = torch.tensor(
            float(e._dispatch.autotune is not None and e._dispatch.autotune.is_done)
        )
        if e.perform(Request(Kind.BROADCAST, "broadcast.over", over, root=0)).item():
            break
    else:
        pytest.fail("the sweep does not end")
    e.perform(Request(Kind.BARRIER))
    e.shutdown()
    return used, fused


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_results_stay_right_and_the_best_stays(
    ranks: Ranks, tmp_path: Path, hosts: list[str]
) -> None:
    log = tmp_path / "log.csv"
    env = {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": str(log),
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    }
    (used, fused), (unused, _) = ranks(2, steps_until_done, hosts=hosts, env=env, timeout=150)
    assert unused == []
    assert list(dict.fromkeys(used))[: len(CANDIDATES)] == list(CANDIDATES), (
        "all were tried, in order"
    )
    assert_table(log, [0, 1, 2, 4, 8, 16, 32, 64])
    assert used[-1] == float(rows(log)[-1]["tensor_fusion_threshold"]) * MB, "the best is applied"
    alone = list(itertools.takewhile(lambda each: each[0] == 0, fused))
    assert alone and {count for _, count in alone} == {1}, (
        "nothing is fused while the threshold is 0"
    )
    assert max(count for _, count in fused) > 1


def test_without_the_variable_nothing_is_tried(ranks: Ranks) -> None:
    def thresholds() -> tuple[object, int]:
        e = engine.start()
        assert e._coordinator is not None
        return e._dispatch.autotune, e._coordinator.fusion

    assert ranks(1, thresholds) == [(None, 128 << 20)]


def test_a_log_that_rank_0_cannot_write_ends_the_start_on_all_ranks(ranks: Ranks) -> None:
    """Only rank 0 knows: the others are told, and need not wait until their patience is over."""

    def begin() -> str:
        try:
            engine.start().perform(Request(Kind.BARRIER))
        except AllstepError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    said = ranks(
        2, begin, env={"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "/no/such/log.csv"}
    )
    assert (
        said[0]
        == "ConfigError: HOROVOD_AUTOTUNE_LOG='/no/such/log.csv' cannot be written: No such file or"
        " directory"
    )
    assert said[1].startswith("EngineStopped: Horovod has been shut down by rank 0")
