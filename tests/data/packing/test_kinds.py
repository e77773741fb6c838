"""Images of every format that a class folder may contain can be packed into every kind of shard.

Reference: Pillow.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from allstep.data.image.decode import decode
from allstep.data.opening import open_source
from allstep.data.packing.image import SUFFIXES, kind_of
from allstep.data.packing.pack import pack
from allstep.data.packing.shard_plan import Options
from allstep.data.sources import class_folders
from allstep.data.sources.tar import source as tar
from support.image_folders import aged, encoded, image


def test_readers_of_tars_know_every_suffix_that_is_written() -> None:
    assert set(SUFFIXES.values()) <= set(tar.IMAGES)


def files() -> dict[str, bytes]:
    """Return an image of each format that a class folder may contain, by suffix."""
    pillows = {
        **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "JPEG"),
        ".tif": "TIFF",
        ".pgm": "PPM",
    }
    made = {}
    for suffix in set(class_folders.IMAGES) - {".jp2", ".avif"}:
        file = io.BytesIO()
        mode = {".pgm": "L", ".pbm": "1"}.get(suffix, "RGB")
        image(1, 20, 30).convert(mode).save(
            file, pillows.get(suffix, "PPM" if suffix == ".pbm" else suffix[1:].upper())
        )
        made[suffix] = file.getvalue()
    return made


@pytest.mark.parametrize("to", ["tfrecord", "tar"])
def test_every_kind_keeps_its_bytes(tmp_path: Path, to: str) -> None:
    made = files()
    (tmp_path / "src" / "cat").mkdir(parents=True)
    for suffix, content in made.items():
        (tmp_path / "src" / "cat" / f"a{suffix}").write_bytes(content)
    outcome = pack(
        open_source(aged(tmp_path / "src")), "src", tmp_path / "out", Options("x", to), strict=True
    )
    there = open_source(tmp_path / "out")
    assert len(there) == outcome.num_samples == len(made)
    found = sorted(bytes(there.read(number).data) for number in range(len(there)))
    assert found == sorted(made.values())


@pytest.mark.parametrize("to", ["tfrecord", "tar"])
@pytest.mark.parametrize(
    ("name", "kind"), [("a.tif", "TGA"), ("a.jp2", "JPEG2000"), ("a.avif", "AVIF")]
)
def test_a_kind_without_a_suffix_becomes_png(tmp_path: Path, to: str, name: str, kind: str) -> None:
    content = encoded(1, kind=kind)
    assert kind_of(content) == "other"
    (tmp_path / "src" / "cat").mkdir(parents=True)
    (tmp_path / "src" / "cat" / name).write_bytes(content)
    source = open_source(aged(tmp_path / "src"))
    pack(source, "src", tmp_path / "out", Options("x", to), strict=True)
    stored = open_source(tmp_path / "out").read(0).data
    assert kind_of(stored) == "png"
    np.testing.assert_array_equal(
        decode(stored), np.array(Image.open(io.BytesIO(content)).convert("RGB"))
    )


@pytest.mark.parametrize("turn", [5, 6, 7, 8])
@pytest.mark.parametrize("options", [{"max_side": 25}, {"raw": True}, {"format": "png"}])
def test_a_turned_tiff_keeps_its_proportions(
    tmp_path: Path, turn: int, options: dict[str, Any]
) -> None:
    """Orientation is ignored, so the size of the stored pixels counts, not that of the turned."""
    picture = image(1, 20, 30)
    found = []
    for name, tags in (("plain", {}), ("turned", {274: turn})):
        folder = tmp_path / name / "cat"
        folder.mkdir(parents=True)
        picture.save(folder / "a.tif", tiffinfo=tags)
        out = tmp_path / f"{name}-out"
        pack(open_source(aged(tmp_path / name)), "src", out, Options("x", **options), strict=True)
        data = open_source(out).read(0).data
        found.append(data if isinstance(data, np.ndarray) else decode(data))
    np.testing.assert_array_equal(*found)
