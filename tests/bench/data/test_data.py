"""`allstep bench data`: every contender reads real images once, tiny; ratios, verdicts and the
ways out on figures made up."""

import io
import json
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from rich.console import Console

from allstep.bench.data import ceiling as data_alone
from allstep.bench.data import measure as data
from allstep.bench.data import peers as data_peers
from allstep.bench.data import reader as data_reader
from allstep.bench.data.peers import PEERS, SMALL_PEERS, Settings
from allstep.bench.data.reader import OURS, PACKED, RAW, Reader, count, readers
from allstep.bench.data.result import STAGES, WHOLE, DataResult, DataRow
from allstep.bench.result import Missing
from allstep.data.loading.batch_memory import Buffer
from allstep.data.opening import open_source
from allstep.errors import DataError
from support.image_folders import aged


def photographs(folder: Path, side: int, number: int = 12) -> Path:
    random = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
    for each in range(number):
        coarse = random.integers(0, 256, (6, 6, 3), np.uint8)
        image = cv2.resize(coarse, (side + each, side), interpolation=cv2.INTER_CUBIC)
        suffix = "jpg" if side > 64 else "png"
        cv2.imwrite(
            str(folder / ("cat", "dog")[each % 2] / f"{each}.{suffix}"),
            image[:, :side] if side <= 64 else image,
        )
    return aged(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("large")
    source = open_source(str(photographs(folder / "src", 120)))
    return data.prepare(source, Settings(str(folder), 64 + 32, 4, 1), lambda text: None)


@pytest.mark.usefixtures("peers")
@pytest.mark.timeout(240)  # TensorFlow is imported
@pytest.mark.filterwarnings("ignore")  # of the peers
@pytest.mark.parametrize("name", data_reader.names(small=False))
def test_everybody_reads_large_images(
    name: str, large: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := data._absent(name):
        assert name == "DALI", reason
        return
    monkeypatch.setattr(data_peers, "_random", None)
    here = Settings(
        large.folder, large.size, large.batch, 0
    )  # peers without worker processes of their own
    batches = readers(small=False)[name](here if name in PEERS else large)
    assert list(islice(batches, 4)) == [4, 4, 4, 4]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("small")
    source = open_source(str(photographs(folder / "src", 20)))
    return data.prepare(source, Settings(str(folder), 224, 4, 1), lambda text: None)


@pytest.mark.usefixtures("peers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [RAW, *SMALL_PEERS])
def test_everybody_reads_small_images(name: str, small: Settings) -> None:
    assert small.size == 20
    here = Settings(small.folder, small.size, small.batch, 0)
    batches = readers(small=True)[name](here if name in SMALL_PEERS else small)
    assert list(islice(batches, 4)) == [4, 4, 4, 4]


def test_stages(large: Settings, small: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_SECONDS_PER_STAGE", 0.01)
    for settings, name in ((large, OURS), (large, PACKED), (large, RAW), (small, RAW)):
        speeds = data.measure_stages(settings, name)
        assert tuple(speeds) == (*STAGES, WHOLE) and all(speed > 0 for speed in speeds.values())


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", data_alone.KINDS)
@pytest.mark.parametrize("name", [OURS, RAW])
def test_plain_workers_do_the_work_of_the_loader(
    name: str, kind: Any, large: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(large.folder, large.size, 4, 2)
    recipe = data_alone.recipe_of(settings, name)
    assert data_alone._SPEEDS[kind](recipe, settings, 0.001) > 0


def test_a_plain_worker_makes_the_images_of_the_loader(large: Settings) -> None:
    """Reference: the transform, sample by sample. Two workers share an epoch between them."""
    recipe = data_alone.recipe_of(large, OURS)
    transform, order = recipe.transform, np.random.default_rng(0).permutation(12)
    assert transform is not None
    workers = [data_alone.Plain(recipe, 4, rank, 2, Buffer) for rank in range(2)]
    assert [worker._fill(number) for worker in workers for number in range(3)] == [2] * 6
    for row, number in enumerate(order[[0, 1, 4, 5, 8, 9]].tolist()):
        expected = np.empty((large.size, large.size, 3), np.uint8)
        transform.one(
            recipe.source.read(number).data, expected, transform.draw(0, 0, np.array([number])), 0
        )
        assert np.array_equal(workers[0]._outs[row // 2][row % 2], expected)
    assert workers[0]._fill(3) == 2  # the next epoch


def test_counting_throws_away_what_was_gathered() -> None:
    given = chain([100] * 4, repeat(1))
    answer = count(given, 0.001)
    assert answer["pictures"] > 0 and answer["seconds"] >= 0.001
    assert next(given) == 1


def test_a_reader_answers(large: Settings) -> None:
    answer = Reader(OURS, large).answer({"seconds": 0.01})
    assert answer["pictures"] > 0 and answer["first"] > 0 and answer["seconds"] > 0


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(240)  # three processes that import torch
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "names", lambda small: [OURS, RAW, "DataLoader, OpenCV", "DALI"])
    monkeypatch.setattr(data, "_SECONDS_PER_TURN", 0.05)
    monkeypatch.setattr(data, "_SECONDS_PER_STAGE", 0.01)
    told: list[str] = []
    result = data.measure_data(
        [str(photographs(tmp_path / "src", 100))], 65, 4, 1, repetitions=2, progress=told.append
    )
    assert told == ["preparing", "warming up", "round 1 of 2", "round 2 of 2", "stages"]
    assert [row.name for row in result.rows] == [OURS, RAW, "DataLoader, OpenCV"]
    assert all(len(row.speeds) == 2 for row in result.rows) and set(result.stages) == {OURS, RAW}
    assert result.missing == [Missing("DALI", "nvidia.dali is not installed")]
    assert set(result.alone) == {OURS, RAW}
    assert all(
        len(speeds) == 2 and min(speeds) > 0
        for form in result.alone.values()
        for speeds in form.values()
    )


@pytest.mark.parametrize("side", [20, 120])
def test_a_broken_image_is_named(tmp_path: Path, side: int) -> None:
    first = sorted(photographs(tmp_path / "src", side).glob("cat/*"))[0]
    first.write_bytes(first.read_bytes()[:40])
    (tmp_path / "bench").mkdir()
    with pytest.raises(DataError, match=rf"sample 0 .*{first.name}.*allstep data verify"):
        data.prepare(
            open_source(tmp_path / "src"),
            Settings(str(tmp_path / "bench"), 96, 4, 1),
            lambda text: None,
        )


def test_small_images_have_one_size(tmp_path: Path) -> None:
    last = sorted(photographs(tmp_path / "src", 20).glob("dog/*"))[-1]
    cv2.imwrite(str(last), np.zeros((10, 30, 3), np.uint8))
    (tmp_path / "bench").mkdir()
    with pytest.raises(DataError, match="expected 20x20 as the first one, found 10x30"):
        data.prepare(
            open_source(tmp_path / "src"),
            Settings(str(tmp_path / "bench"), 96, 4, 1),
            lambda text: None,
        )


def test_synthetic_images_will_do(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path), 65, 4, 1)
    data.prepare(data.First(open_source("synthetic:100x80x100"), 8), settings, lambda text: None)
    assert list(islice(readers(small=False)[OURS](settings), 2)) == [4, 4]


def test_decoded_large_images_are_refused(large: Settings) -> None:
    source = open_source(str(large.path / "raw"))
    with pytest.raises(DataError, match="stored decoded"):
        data._write_files(source, large.path / "again")


def made_up(size: int = 224) -> DataResult:
    speeds = dict.fromkeys((*STAGES, WHOLE), 1000.0)
    stages = {OURS: {**speeds, "decode": 600.0, WHOLE: 550.0}, RAW: {**speeds, "augment": 9.0}}
    rows = [
        DataRow(OURS, (1000.0, 1100.0, 1200.0), 0.5, 100 << 20),
        DataRow(RAW, (9000.0, 8000.0, 9000.0), 0.5, 90 << 20),
        DataRow("DataLoader, Pillow", (500.0, 1100.0, 600.0), 1.5, 500 << 20),
        DataRow("tf.data", (900.0, 1000.0, 1500.0), 1.5, 500 << 20),
    ]
    alone = {OURS: {"threads": (1000.0, 1000.0, 1000.0), "processes": (1250.0, 1375.0, 2000.0)}}
    return DataResult(
        "here", 500, size, 64, 2, rows, stages, [Missing("DALI", "it is not installed")], alone
    )


def test_ratios_and_verdicts() -> None:
    result, other = made_up(), made_up(size=128)
    by_name = {row.name: row for row in result.rows}
    assert result.ratios(by_name[OURS], by_name["DataLoader, Pillow"]) == [2.0, 1.0, 2.0]
    assert result._ratio(by_name[OURS], by_name["DataLoader, Pillow"]) == "2.00 (met: 1.6)"
    assert result._ratio(by_name[RAW], by_name["tf.data"]) == "8.00 (met: 8)"
    assert result._ratio(by_name[RAW], by_name["DataLoader, Pillow"]) == "15.00"
    assert other._ratio(other.rows[0], other.rows[2]) == "2.00"
    assert result.bottleneck(OURS) == "decode" and result.bottleneck(RAW) == "augment"
    assert result.kept(by_name[OURS]) == {"threads": 1.1, "processes": 0.8, "times one thread": 1.0}
    assert result.kept(by_name[RAW]) == {"times one thread": 4.5}


def test_the_ways_out(tmp_path: Path) -> None:
    result = made_up()
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(result.table())
    text = console.export_text()
    threads, processes = "110% of 2 threads (met: 90%)", "80% of 2 processes (not met: 90%)"
    delivered = f"the loader delivers {threads}, {processes}, 100% of 2 times one thread alone"
    assert f"{OURS}: decode-bound; {delivered}" in text
    assert "110% of 2 threads, 80% of 2 processes, 100%" in made_up(size=128)._summary(
        made_up().rows[0]
    )
    assert "not met: 1" not in text.replace("not met: 1.6", "")
    assert result.absences() == ["missing: DALI (it is not installed)"]
    rows = {row["name"]: row for row in json.loads(result.to_json())["rows"]}
    assert (
        rows["tf.data"]["promises"] == {OURS: 1.1, RAW: 8.0}
        and rows[OURS]["stages"]["decode"] == 600.0
    )
    assert rows[OURS]["alone"]["threads"] == [1000.0] * 3 and rows[OURS]["kept"]["threads"] == 1.1
    assert rows["tf.data"]["alone"] == {} and rows["tf.data"]["kept"] == {}
    result.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
