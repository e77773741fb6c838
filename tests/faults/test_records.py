"""The fault `corrupt`: where records have checksums it is found, in threads and processes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from allstep import faults
from allstep.data import Loader
from allstep.data.augment.transform import Transform
from allstep.data.opening import open_source
from allstep.data.sources.source import Source
from allstep.data.sources.tar.source import TarSource
from support.array_sources import Arrays, sample_images
from support.image_folders import make_folder
from support.packed import packed

VICTIM = 5
SMALL = Transform(lambda image: np.ascontiguousarray(image[:8, :8]), shape=(8, 8, 3))


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALLSTEP_STORE", "ALLSTEP_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("images"))


def read_through(source: Source, quarantine: Path, kind: str, workers: int) -> list[dict[str, str]]:
    """Read all samples through a loader; return its list of bad ones."""
    options = {"kind": kind, "workers": workers, "batch": 6, "budget": 10}
    loader = Loader(source, SMALL, quarantine=quarantine, seed=None, **options)  # type: ignore[arg-type]
    seen = [number for batch in loader.batches(0, len(source)) for number in batch.samples.tolist()]
    loader.close()
    bad = list(map(json.loads, quarantine.read_text().splitlines()))
    assert sorted([*seen, *(line["number"] for line in bad)]) == list(range(len(source)))
    return bad


@pytest.mark.parametrize(("kind", "workers"), [("threads", 0), ("threads", 2)])
def test_the_checksum_of_a_record_finds_it(
    images: Path, tmp_path: Path, kind: str, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    packed(images, tmp_path / "packed")
    source = open_source(str(tmp_path / "packed"))
    with faults.inject(f"corrupt@sample={VICTIM}"):
        (bad,) = read_through(source, tmp_path / "bad.jsonl", kind, workers)
    assert bad["number"] == VICTIM and "the bytes are damaged" in bad["reason"]
    line = f"fault corrupt@sample={VICTIM}: rank 0 reads damaged bytes at sample {VICTIM}"
    assert capfd.readouterr().err.count(line) == 1
    assert source.read(VICTIM).data


@pytest.mark.usefixtures("processes")
def test_a_worker_process_of_a_loader_reads_it(
    images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Faults of other kinds do not concern it."""
    packed(images, tmp_path / "packed")
    source = open_source(str(tmp_path / "packed"))
    with faults.inject(f"corrupt@sample={VICTIM}", "kill@seconds=3600", "disk-full"):
        (bad,) = read_through(source, tmp_path / "bad.jsonl", "processes", 1)
    assert bad["number"] == VICTIM and "the bytes are damaged" in bad["reason"]
    assert f"rank 0 reads damaged bytes at sample {VICTIM}" in capfd.readouterr().err


def test_the_checksum_of_a_tar_finds_it(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path / "packed", to="tar")
    (tar,) = (tmp_path / "packed").glob("*.tar")
    source = TarSource(tar, checksum=True)
    with faults.inject(f"corrupt@sample={VICTIM}"):
        (bad,) = read_through(source, tmp_path / "bad.jsonl", "threads", 0)
    assert bad["number"] == VICTIM and "CRC32C" in bad["reason"]


def test_arrays_have_no_checksum_and_change(tmp_path: Path) -> None:
    source = Arrays(sample_images(12))
    loader = Loader(source, batch=12, seed=None, workers=0)
    (good,) = loader.batches(0, 12)
    with faults.inject(f"corrupt@sample={VICTIM}"):
        (damaged,) = Loader(source, batch=12, seed=None, workers=0).batches(0, 12)
    differs = [not torch.equal(a, b) for a, b in zip(good.data, damaged.data, strict=True)]
    assert [number for number, each in enumerate(differs) if each] == [VICTIM]
    assert int((good.data != damaged.data).sum()) == 8
