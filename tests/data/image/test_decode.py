"""From stored bytes to images. Reference: Pillow, and the image that was encoded."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from allstep.data.augment import CentreCrop, Resize
from allstep.data.augment.crop import cropped
from allstep.data.image.decode import decode
from allstep.data.image.size import size_of
from support.synthetic_photos import by_pillow, distance, encoded, scene

IMAGE = scene(37, 53)
NONE = np.empty(0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("GIF", {})],
)
def test_lossless_kinds_give_back_what_was_stored(kind: str, options: dict[str, bool]) -> None:
    data = encoded(IMAGE, kind, **options)
    assert np.array_equal(decode(data), IMAGE if kind != "GIF" else by_pillow(data))


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {"quality": 80})]
)
@pytest.mark.parametrize("channels", [3, 1])
def test_lossy_kinds_are_as_pillow_decodes_them(
    kind: str, options: dict[str, bool], channels: int
) -> None:
    data = encoded(IMAGE, kind, **options)
    wanted = by_pillow(data, "RGB" if channels == 3 else "L")
    assert distance(decode(data, channels), wanted) < (
        0.01 if kind == "JPEG" and channels == 3 else 1
    )


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1"])
def test_grey_palette_and_alpha_become_rgb_and_grey(mode: str) -> None:
    data = encoded(IMAGE, "PNG", mode=mode)
    assert np.array_equal(decode(data), by_pillow(data))
    assert distance(decode(data, 1), by_pillow(data, "L")) < 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("TIFF", {}),
        ("WEBP", {"lossless": True, "exact": True}),
        ("AVIF", {"quality": 100, "subsampling": "4:4:4"}),
        ("BMP", {}),
    ],
)
@pytest.mark.parametrize("alpha", [0, 64])
def test_transparency_is_dropped_not_blended(
    kind: str, options: dict[str, bool], alpha: int
) -> None:
    clear = np.dstack([IMAGE, np.full(IMAGE.shape[:2], alpha, np.uint8)])
    found = decode(encoded(clear, kind, **options))
    if kind == "AVIF":
        assert distance(found, IMAGE) < 4
    else:
        assert np.array_equal(found, IMAGE)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
@pytest.mark.parametrize("channels", [1, 3])
def test_of_sixteen_bits_the_upper_eight_stay(kind: str, channels: int) -> None:
    levels = np.arange(37 * 53, dtype=np.uint16).reshape(37, 53) * 33
    image = decode(_saved(Image.fromarray(levels), kind), channels)
    assert image.shape == (37, 53, channels)
    assert np.abs(image.astype(int) - (levels // 256)[..., None]).max() <= 1


@pytest.mark.parametrize(("kind", "words"), [("f4", "floating-point"), ("i4", "32 bits")])
def test_pixels_whose_range_is_not_known_are_refused(kind: str, words: str) -> None:
    levels = np.linspace(0, 1, 37 * 53).reshape(37, 53).astype(kind)
    with pytest.raises(ValueError, match=rf"^its pixels are .*{words}.*store 8 or 16 bits"):
        decode(_saved(Image.fromarray(levels), "TIFF"))


@pytest.mark.parametrize(
    ("kind", "turn"),
    [("JPEG", 6), ("PNG", 6), ("WEBP", 6), *(("TIFF", turn) for turn in range(1, 10))],
)
def test_the_orientation_of_exif_is_ignored(kind: str, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(IMAGE, kind, exif=exif)
    assert decode(data).shape == IMAGE.shape
    if kind != "JPEG":
        assert size_of(data) == IMAGE.shape[:2]
    assert np.array_equal(decode(data), IMAGE if kind == "TIFF" else by_pillow(data))


@pytest.mark.parametrize("mode", ["RGB", "YCbCr", "L"])
def test_jpeg_2000_has_the_colors_that_pillow_shows(mode: str) -> None:
    file = io.BytesIO()
    Image.fromarray(IMAGE).convert(mode).save(file, "JPEG2000")
    assert np.array_equal(decode(file.getvalue()), by_pillow(file.getvalue()))


def test_transparent_pixels_of_a_gif_keep_their_color() -> None:
    file = io.BytesIO()
    Image.fromarray(IMAGE).quantize(16).save(file, "GIF", transparency=3)
    assert np.array_equal(decode(file.getvalue()), by_pillow(file.getvalue()))


def test_a_small_tiff_of_huge_tiles_is_refused() -> None:
    """10 x 10 pixels in one tile of 26,736 x 26,720: 2 GB in libtiff."""
    shorts = [(256, 10), (257, 10), (258, 8), (259, 1), (262, 1), (277, 1)]
    longs = [(322, 26_736), (323, 26_720), (324, 200), (325, 100)]
    entries = [struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in shorts]
    entries += [struct.pack("<HHII", tag, 4, 1, value) for tag, value in longs]
    code = b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(200)
    with pytest.raises(ValueError, match=r"^tiles of this TIFF: too large: 26720 x 26736 pixels"):
        decode(code)


def test_pillows_own_limit_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert np.array_equal(decode(encoded(IMAGE, "TIFF")), IMAGE)


@pytest.mark.parametrize(
    "kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)]
)
def test_any_buffer_will_do(kind: type) -> None:
    data = encoded(IMAGE)
    assert np.array_equal(decode(kind(data)), decode(data))
    assert np.array_equal(
        cropped(kind(data), CentreCrop(20), NONE), cropped(data, CentreCrop(20), NONE)
    )


def test_arrays_pass_and_are_copied() -> None:
    given = decode(IMAGE)
    assert np.array_equal(given, IMAGE) and not np.shares_memory(given, IMAGE)
    grey = scene(9, 7, channels=1)
    assert np.array_equal(decode(grey[..., 0], 1), grey)
    assert np.array_equal(decode(grey), np.repeat(grey, 3, axis=2))
    assert (
        distance(decode(IMAGE, 1), np.asarray(Image.fromarray(IMAGE).convert("L"))[..., None]) < 1
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no bytes at all"),
        (b"This is no image.", "not an image: 17 bytes that begin with b'This is '"),
        (encoded(IMAGE, "PNG")[:2000], "broken image|not an image"),
        (encoded(IMAGE, "WEBP", quality=90)[:300], "broken image|not an image"),
        (b"\xff\xd8\xff", "broken image|not an image"),
        (7, "int is neither an encoded image nor an array"),
        (np.zeros((4, 4), np.float32), "uint8 .* not float32"),
        (np.zeros((4, 4, 5), np.uint8), "5 channels cannot be given as 3"),
    ],
)
def test_what_is_no_image_is_a_value_error(data: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode(data)
    with pytest.raises(ValueError, match=says):
        cropped(data, Resize(8), NONE)


@pytest.mark.parametrize("position", [0.2, 0.5, 0.8])
def test_a_png_with_a_broken_byte_is_an_error(position: float) -> None:
    """PNG has checksums of its own."""
    data = bytearray(encoded(IMAGE, "PNG"))
    data[int(len(data) * position)] ^= 0x55
    with pytest.raises(ValueError, match="broken image"):
        decode(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "array"])
@pytest.mark.parametrize("channels", [3, 1])
def test_a_crop_goes_straight_into_its_place(kind: str, channels: int) -> None:
    data = scene(90, 110) if kind == "array" else encoded(scene(90, 110), kind)
    batch = np.zeros((3, 24, 24, channels), np.uint8)
    given = cropped(data, CentreCrop(24), NONE, channels, batch[1])
    assert np.shares_memory(given, batch)
    assert np.array_equal(batch[1], cropped(data, CentreCrop(24), NONE, channels))
    assert not batch[0].any() and not batch[2].any()


def test_memory_with_gaps_will_do_too() -> None:
    data, wide = encoded(scene(90, 110)), np.zeros((24, 48, 3), np.uint8)
    cropped(data, CentreCrop(24), NONE, 3, wide[:, ::2])
    assert np.array_equal(wide[:, ::2], cropped(data, CentreCrop(24), NONE))
    assert not wide[:, 1::2].any()


def _saved(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_opencv_says_nothing_of_cut_images_on_its_own(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = encoded(IMAGE, kind)
    with pytest.raises(ValueError):
        decode(data[: len(data) // 2])
    assert capfd.readouterr() == ("", "")


def test_a_tiff_whose_strips_do_not_unpack_is_broken() -> None:
    """OpenCV gives out what it has of them; most flipped bits in deflated strips are found by
    Pillow."""
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(image).save(content, "TIFF", compression="tiff_adobe_deflate")
    code = bytearray(content.getvalue())
    np.testing.assert_array_equal(decode(bytes(code)), image)
    code[len(code) // 2] ^= 0x10
    with pytest.raises(ValueError, match="broken image"):
        decode(bytes(code))
