"""Images with more pixels than allowed are refused by their headers: as bad samples, everywhere,
before anything is decoded."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.data import Loader, open_source
from allstep.data.augment import CentreCrop
from allstep.data.augment.crop import cropped
from allstep.data.augment.transform import Transform
from allstep.data.image import size
from allstep.data.image.decode import decode
from allstep.data.image.limit import MAX_PIXELS, check_size
from allstep.data.packing.image import ImageOptions, recode
from allstep.errors import ConfigError
from allstep.train import read_config
from allstep.train.input.images import inspect_images, make_transform
from support.image_folders import aged, make_folder
from support.synthetic_photos import encoded, scene

HEIGHT, WIDTH = 37, 53
KINDS: dict[str, dict[str, Any]] = {
    "JPEG": {},
    "JPEG of 4 colors": {"mode": "CMYK"},
    "PNG": {},
    "GIF": {},
    "BMP": {},
    "TIFF": {},
    "PPM": {},
    "TGA": {},
    "WEBP": {"quality": 80},
    "WEBP lossless": {"lossless": True},
    "WEBP with EXIF": {"exif": Image.Exif()},
    "JPEG2000": {},
}


def file_of(kind: str) -> bytes:
    options = {**KINDS[kind]}
    if "exif" in options:
        options["exif"][0x0112] = 1
    return encoded(scene(HEIGHT, WIDTH), kind.split()[0], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_that_of_the_decoded_image(kind: str) -> None:
    code = file_of(kind)
    assert decode(code).shape == (HEIGHT, WIDTH, 3)
    if not kind.startswith("JPEG"):
        assert size.size_of(memoryview(code)) == (HEIGHT, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
def test_one_pixel_too_many_is_refused_before_decoding(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, most = file_of(kind), HEIGHT * WIDTH
    assert cropped(code, CentreCrop(8), np.empty(0), max_pixels=most).shape == (8, 8, 3)
    assert recode(code, ImageOptions(max_pixels=most, format="png")).shape == (HEIGHT, WIDTH)

    def decoded(*given: Any, **options: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(cv2, "imdecode", decoded)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", decoded)
    monkeypatch.setattr(Image.Image, "convert", decoded)
    out = np.empty((8, 8, 3), np.uint8)
    transform = Transform(CentreCrop(8), max_pixels=most - 1)
    for attempt in (
        lambda: decode(code, max_pixels=most - 1),
        lambda: cropped(code, CentreCrop(8), np.empty(0), max_pixels=most - 1),
        lambda: transform.one(code, out, transform.draw(0, 0, np.array([0])), 0),
        lambda: recode(code, ImageOptions(max_pixels=most - 1)),
        lambda: recode(code, ImageOptions(max_pixels=most - 1, format="jpeg")),
    ):
        with pytest.raises(
            ValueError, match=rf"too large: {HEIGHT} x {WIDTH} pixels, .* data.max_pixels"
        ):
            attempt()


def png_of(height: int, width: int) -> bytes:
    """A PNG whose header claims this size; its pixels are missing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_the_default_is_100_million() -> None:
    check_size((10_000, 10_000), MAX_PIXELS)
    expected = r"too large: 10001 x 10000 pixels, 100 million, expected at most 100 million"
    with pytest.raises(ValueError, match=expected):
        decode(png_of(10_001, 10_000))
    with pytest.raises(ValueError, match="broken image"):
        decode(png_of(10_001, 10_000), max_pixels=200_000_000)


def test_a_image_without_pixels_is_broken() -> None:
    """Found by fuzzing: a GIF whose header says 0 pixels was resized to nothing."""
    code = bytearray(file_of("GIF"))
    code[6:8] = bytes(2)
    for attempt in (
        decode,
        lambda code: recode(code, ImageOptions()),
        lambda code: recode(code, ImageOptions(format="png")),
        lambda code: recode(code, ImageOptions(max_side=7)),
    ):
        with pytest.raises(ValueError, match=f"broken image: {HEIGHT} x 0 pixels"):
            attempt(bytes(code))


def test_eps_is_not_opened() -> None:
    """Pillow would start Ghostscript for it."""
    code = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(ValueError, match="not an image"):
        decode(code)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 images, and one that is larger than the others."""
    made = make_folder(tmp_path / "photos")
    (made / "cat" / "large.png").write_bytes(png_of(20_000, 20_000))
    return aged(made)


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_verify_and_pack_and_show(folder: Path, tmp_path: Path) -> None:
    found = call("data", "verify", folder, "--list", tmp_path / "bad.jsonl")
    assert found.exit_code == 1 and "1 of 25 samples are bad" in found.output
    assert "too large: 20000 x 20000" in json.loads((tmp_path / "bad.jsonl").read_text())["reason"]
    assert "25 of 25 samples are bad" in call("data", "verify", folder, "--max-pixels", 100).output
    packed = call("data", "pack", folder, tmp_path / "packed")
    assert packed.exit_code == 0, packed.output
    assert len(open_source(str(tmp_path / "packed"))) == 24
    assert (
        "too large" in json.loads((tmp_path / "packed" / "quarantine.jsonl").read_text())["reason"]
    )
    other = call("data", "pack", folder, tmp_path / "packed", "--max-pixels", 1000)
    assert "max_pixels 100000000, now 1000" in str(other.exception)
    # All but the largest keep their bytes; that one is decoded, and found to be broken, only where
    # it is not refused before.
    allowed = call("data", "pack", folder, tmp_path / "all", "--max-pixels", 10**9, "--strict")
    assert allowed.exit_code == 0, allowed.output
    shown = call(
        "data", "show", folder, "--out", tmp_path / "sheet.png", "--samples", 25, "--epochs", 1
    )
    assert shown.exit_code == 0, shown.output


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_loader_skips_and_lists_it(folder: Path, tmp_path: Path, kind: Any) -> None:
    source = open_source(str(folder))
    options: dict[str, Any] = {"batch": 25, "seed": None, "workers": 1, "kind": kind}
    for most, num_bad in ((MAX_PIXELS, 1), (30 * 32, 4)):
        listed = tmp_path / f"{kind}-{most}.jsonl"
        with_limit = Transform(CentreCrop(8), max_pixels=most)
        loader = Loader(source, with_limit, quarantine=listed, **options)
        (batch,) = loader
        loader.close()
        assert batch.weight == 25 - num_bad and loader.num_bad == num_bad
        assert listed.read_text().count("too large") == num_bad


def test_the_key_of_a_run_reaches_its_transforms(folder: Path) -> None:
    words = [f"data.train={folder}", "data.augment=CentreCrop(8)", "data.prepare=CentreCrop(8)"]
    for most in (MAX_PIXELS, 10**9):
        section = read_config("defaults", [*words, f"data.max_pixels={most}"]).data
        source = open_source(str(folder))
        seen = inspect_images(source, np.arange(len(source)), section)
        made = [make_transform(key, section, seen) for key in ("augment", "prepare")]
        assert [each.max_pixels for each in made if each] == [most, most]
    with pytest.raises(ConfigError, match=r"data\.max_pixels"):
        read_config("defaults", [*words, "data.max_pixels=0"])
