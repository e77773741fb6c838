"""JPEGs cut down to a crop.

Reference: the whole image, decoded by the same library, or by Pillow.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from allstep.data.augment import CentreCrop
from allstep.data.augment.crop import cropped
from allstep.data.augment.frame import Frame
from allstep.data.image import decode, jpeg
from allstep.data.image.jpeg_cut import cut
from allstep.data.image.jpeg_header import Odd, read_header
from allstep.data.image.pixels import Region
from allstep.data.image.resize import cut_out
from support.synthetic_photos import by_pillow, distance, encoded, scene

RESTARTS: list[dict[str, int]] = [
    {},
    {},
    {"restart_marker_rows": 1},
    {"restart_marker_rows": 3},
    {"restart_marker_blocks": 5},
]


@st.composite
def crops(draw: Any) -> tuple[bytes, Region]:
    """A JPEG of any kind, and a part of it."""
    height, width = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    channels = draw(st.sampled_from([3, 3, 3, 1]))
    options = {
        "quality": draw(st.sampled_from([30, 75, 97])),
        "progressive": draw(st.sampled_from([False, False, True])),
    }
    options |= {"subsampling": draw(st.sampled_from([0, 1, 2]))} | draw(st.sampled_from(RESTARTS))
    data = encoded(scene(height, width, channels=channels), **options)
    h, w = draw(st.integers(1, height)), draw(st.integers(1, width))
    return data, Region(draw(st.integers(0, height - h)), draw(st.integers(0, width - w)), h, w)


@given(crop=crops(), channels=st.sampled_from([1, 3]))
def test_a_part_is_the_same_as_in_the_whole_image(
    crop: tuple[bytes, Region], channels: int
) -> None:
    data, region = crop
    whole = simplejpeg.decode_jpeg(data, "RGB" if channels == 3 else "GRAY")
    size = region.height, region.width
    part = cut_out(*jpeg.decode_part(memoryview(data), lambda h, w: region, size, channels), size)
    top, left, height, width = region
    assert np.array_equal(part, whole[top : top + height, left : left + width])


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize(
    ("restart", "rows"), [({}, (0, 112)), ({"restart_marker_rows": 1}, (64, 112))]
)
def test_only_the_rows_of_the_crop_are_decoded(
    subsampling: int, restart: dict[str, int], rows: tuple[int, int]
) -> None:
    data = memoryview(encoded(scene(200, 100), subsampling=subsampling, **restart))
    header = read_header(data)
    found = cut(data, header, Region(70, 10, 35, 20))
    assert found is not None
    assert abs(found.top - rows[0]) < 16 and abs(found.top + found.height - rows[1]) < 16
    assert simplejpeg.decode_jpeg(found.code, strict=False).shape == (found.height, 100, 3)


@pytest.mark.parametrize("sampling", [0x411111, 0x121111, 0x211111, 0x441111])
def test_other_samplings_of_colour(sampling: int) -> None:
    """4:1:1, 4:4:0 and so on; OpenCV writes them. The cut is used, and its rows are right."""
    options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
    data = cv2.imencode(".jpg", scene(150, 130), options)[1].tobytes()
    region = Region(20, 30, 50, 60)
    assert cut(memoryview(data), read_header(memoryview(data)), region) is not None
    part = cut_out(*jpeg.decode_part(memoryview(data), lambda h, w: region, (50, 60), 3), (50, 60))
    assert np.array_equal(part, by_pillow(data)[20:70, 30:90])


def test_grey_with_sampling_factors_that_mean_nothing() -> None:
    data = bytearray(encoded(scene(90, 70, channels=1)))
    data[read_header(memoryview(data)).height_at + 6] = 0x22
    region = Region(10, 10, 21, 30)
    part = cut_out(*jpeg.decode_part(memoryview(data), lambda h, w: region, (21, 30), 1), (21, 30))
    assert np.array_equal(part, simplejpeg.decode_jpeg(data, "GRAY")[10:31, 10:40])


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 5}])
def test_what_cannot_be_cut_is_decoded_whole(options: dict[str, Any]) -> None:
    data = memoryview(encoded(scene(200, 100), **options))
    assert cut(data, read_header(data), Region(0, 0, 20, 20)) is None


def test_the_header_says_the_size_of_files_with_other_segments_first() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(
        scene(40, 60), exif=exif, comment=b"\xff\xc0 is not a frame here", icc_profile=b"x" * 70_000
    )
    header = read_header(memoryview(data))
    assert (header.height, header.width, header.one_scan) == (40, 60, True)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("left", [0.2, 0.5, 0.9, 0.99, "EOI"])
def test_a_truncated_file_is_an_error_also_where_the_crop_is_there(
    left: Any, progressive: bool
) -> None:
    data = encoded(scene(120, 160), progressive=progressive, quality=90)
    short = data[:-2] if left == "EOI" else data[: int(len(data) * left)]
    with pytest.raises(ValueError, match=r"broken|not an image|truncated"):
        decode.decode(short)
    with pytest.raises(ValueError, match=r"broken|not an image|truncated"):
        cropped(short, _Top(), np.empty(0))


def test_truncated_in_front_of_a_wrong_end_is_an_error() -> None:
    """As when a file was cut off and "mended": rows are missing, but the end is there."""
    data = encoded(scene(120, 160), quality=90)
    with pytest.raises(ValueError, match="broken"):
        decode.decode(data[: len(data) // 2] + b"\xff\xd9")


@given(where=st.floats(0, 1), flip=st.integers(1, 255), part=st.booleans())
def test_a_broken_byte_gives_a_image_or_a_value_error(where: float, flip: int, part: bool) -> None:
    data = bytearray(FINE)
    data[int(where * (len(data) - 1))] ^= flip
    try:
        image = cropped(data, _Top(), np.empty(0)) if part else decode.decode(data)
    except ValueError:
        return
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3


def test_a_header_that_lies_about_the_size_takes_no_memory() -> None:
    data = bytearray(FINE)
    at = read_header(memoryview(data)).height_at
    data[at : at + 4] = b"\xff\xdc\xff\xdc"
    with pytest.raises(ValueError, match="65500 x 65500 pixels cannot be in"):
        decode.decode(data)


@pytest.mark.parametrize("extra", [b"\0" * 7, b"abcdefghijkl"])
def test_harmless_complaints_still_give_the_image(extra: bytes) -> None:
    """Bytes that belong nowhere before the end, as some cameras and a few files of ImageNet have
    them."""
    data = FINE[:-2] + extra + b"\xff\xd9"
    with pytest.raises(ValueError, match="extraneous bytes"):
        simplejpeg.decode_jpeg(data)
    assert np.array_equal(decode.decode(data), by_pillow(FINE))
    assert np.array_equal(decode.decode(FINE + b"trailing"), by_pillow(FINE))
    frame = _Top()
    assert np.array_equal(cropped(data, frame, np.empty(0)), cropped(FINE, frame, np.empty(0)))


def test_cmyk_becomes_rgb() -> None:
    data = encoded(scene(50, 60), mode="CMYK")
    assert distance(decode.decode(data), by_pillow(data)) < 1
    assert distance(decode.decode(data), scene(50, 60)) < 4


def test_odd_files_go_to_pillow() -> None:
    """Stray bytes between segments."""
    at = FINE.index(b"\xff\xdb")
    data = FINE[:at] + b"\0\0" + FINE[at:]
    with pytest.raises(Odd):
        jpeg.decode_whole(memoryview(data), 3)
    assert np.array_equal(decode.decode(data), by_pillow(FINE))
    assert np.array_equal(cropped(data, _Top(), np.empty(0)), by_pillow(FINE)[:20, :30])


@pytest.mark.parametrize("stray", [b"", b"\0\0"])
def test_thousands_of_scans_are_refused_before_decoding(stray: bytes) -> None:
    """Each one walks over all blocks again: 2 MB of them take a minute."""
    data = encoded(scene(50, 60), progressive=True)
    first, last = data.index(b"\xff\xdb"), data.rindex(b"\xff\xda")
    many = data[:first] + stray + data[first:last] + data[last:-2] * 300 + data[-2:]
    for work in (decode.decode, lambda code: cropped(code, _Top(), np.empty(0))):
        with pytest.raises(ValueError, match=r"^broken JPEG: 3\d\d scans, expected at most 200"):
            work(many)


@pytest.mark.parametrize("ratio", [2.0, 3.1, 4.0, 9.0])
def test_large_crops_are_decoded_reduced_and_look_the_same(ratio: float) -> None:
    """Against Pillow's antialiased reduction of the whole image: under 2 levels on average."""
    height, width = int(60 * ratio) + 40, int(60 * ratio) + 80
    data, side = encoded(scene(height, width, grain=3), quality=95), int(60 * ratio)
    region = Region(30, 50, side, side)
    image, part = jpeg.decode_part(memoryview(data), lambda h, w: region, (60, 60), 3)
    assert image.shape[0] < height / 1.9 and 60 <= part.height < 120 * (1 + (ratio > 8))
    box = (50, 30, 50 + side, 30 + side)
    wanted = np.asarray(
        Image.fromarray(by_pillow(data)).resize((60, 60), Image.Resampling.BILINEAR, box=box)
    )
    assert distance(cut_out(image, part, (60, 60)), wanted) < 2


@pytest.mark.parametrize("work", ["simplejpeg", "imdecode", "resize"])
def test_decoders_let_other_threads_run(work: str) -> None:
    """With a switch interval of 100 s, another thread moves during a call only if the call itself
    lets go of the lock."""
    image = scene(700, 900)
    data = encoded(image)
    calls: dict[str, Callable[[], Any]] = {
        "simplejpeg": lambda: simplejpeg.decode_jpeg(data),
        "imdecode": lambda: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB),
        "resize": lambda: cv2.resize(image, (2000, 2000)),
    }
    assert _other_thread_moves(calls[work])
    assert not _other_thread_moves(lambda: sum(range(200_000)), tries=3)


def test_opencv_has_no_threads_of_its_own() -> None:
    assert cv2.getNumThreads() == 1


FINE = encoded(scene(60, 80), quality=90)


class _Top(Frame):
    """The upper left corner."""

    size = (20, 30)

    def region(self, height: int, width: int, row: Any) -> Region:
        return Region(0, 0, min(20, height), min(30, width))


def _other_thread_moves(call: Callable[[], Any], tries: int = 200) -> bool:
    count, done = [0], threading.Event()

    def move() -> None:
        while not done.is_set():
            count[0] += 1
            time.sleep(0)  # lets go of the lock, so that the main thread gets it back

    before, thread = sys.getswitchinterval(), threading.Thread(target=move)
    sys.setswitchinterval(100)
    thread.start()
    try:
        return any(_moved_during(call, count) for _ in range(tries))
    finally:
        sys.setswitchinterval(before)
        done.set()
        thread.join()


def _moved_during(call: Callable[[], Any], count: list[int]) -> bool:
    first = count[0]
    call()
    return count[0] != first


@pytest.mark.parametrize("factors", [0x00, 0x10, 0x01, 0xF1, 0xFF])
def test_sampling_factors_that_cannot_be_are_a_bad_sample(factors: int) -> None:
    """A factor of 0 made a division by zero of the search for the rows of a crop."""
    data = bytearray(encoded(scene(60, 80)))
    at = read_header(memoryview(data)).height_at
    for component in range(3):
        data[at + 6 + 3 * component] = factors
    with pytest.raises(Odd):
        read_header(memoryview(data))
    with pytest.raises(ValueError, match="broken image"):
        cropped(bytes(data), CentreCrop(20), np.empty(0))
