"""Binary PGM and PPM files: levels are scaled by the brightest one. Reference: Pillow."""

import io

import numpy as np
import pytest
from PIL import Image

from allstep.data.image.decode import decode


def pnm(
    levels: np.ndarray, brightest: int, header: str = "{kind}\n{width} {height}\n{most}\n"
) -> bytes:
    height, width, depth = levels.shape
    kind = "P5" if depth == 1 else "P6"
    text = header.format(kind=kind, width=width, height=height, most=brightest)
    return text.encode() + levels.astype("u1" if brightest < 256 else ">u2").tobytes()


@pytest.mark.parametrize("brightest", [1, 3, 15, 100, 254, 255, 256, 1000, 4095, 65_534, 65_535])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_levels_are_scaled(brightest: int, depth: int, channels: int) -> None:
    """Up to one level from the exact value: OpenCV drops the lower 8 of 16 bits; grey is weighted."""
    levels = np.linspace(0, brightest, 5 * 7 * depth).round().astype(int).reshape(5, 7, depth)
    found = decode(pnm(levels, brightest), channels)
    assert found.shape == (5, 7, channels) and found.dtype == np.uint8
    exact = levels * 255 / brightest
    if depth == 3 and channels == 1:
        exact = (exact * [0.299, 0.587, 0.114]).sum(axis=2, keepdims=True)
    assert np.abs(found - exact).max() <= 1


@pytest.mark.parametrize("brightest", [15, 100, 200])
@pytest.mark.parametrize("depth", [1, 3])
def test_as_pillow(brightest: int, depth: int) -> None:
    levels = np.random.default_rng(0).integers(0, brightest + 1, (6, 9, depth))
    code = pnm(levels, brightest)
    with Image.open(io.BytesIO(code)) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.abs(decode(code).astype(int) - expected).max() <= 1


def test_comments_and_levels_above_the_brightest() -> None:
    header = "{kind} # made by hand\n{width}\t{height}\n# 4 bits\n{most}\n"
    found = decode(pnm(np.array([[[0], [15], [16], [200]]]), 15, header), 1)
    assert found[0, :, 0].tolist() == [0, 255, 255, 255]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (b"P5 4 3 15\n" + bytes(11), "11 bytes of levels, expected 12"),
        (b"P6 4 3 1000\n" + bytes(71), "71 bytes of levels, expected 72"),
        (b"P5 4 3 0\n" + bytes(12), "its brightest level is 0, expected 1 to 65535"),
        (b"P5 4 3 65536\n" + bytes(24), "its brightest level is 65536, expected 1 to 65535"),
        (b"P5 99999 99999 15\n", "99999 x 99999"),
    ],
)
def test_broken_ones(code: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        decode(code)


@pytest.mark.parametrize("end", [b"\n8 8\n255\n", b""])
@pytest.mark.parametrize("kind", [b"P5", b"P2"])
def test_an_endless_comment_is_refused_at_once(kind: bytes, end: bytes) -> None:
    """Pillow reads headers byte by byte: 40 MB took 10 s."""
    code = kind + b"\n#" + b"a" * 200_000_000 + end + bytes(64)
    with pytest.raises(ValueError, match="its header is incomplete after 65536 bytes"):
        decode(code)
