"""PNG files: color profiles are not passed to libpng, whose warnings would print their names."""

import resource
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.data.image.decode import decode
from allstep.data.image.png import without_profile

HOSTILE = b"\x1b]0;title\x07\x1b[31mred\x1b[2J"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(between: bytes = b"") -> bytes:
    """An image of 5 x 4 pixels, with further chunks behind the header."""
    rows = np.arange(60, dtype=np.uint8).reshape(4, 15)
    pixels = b"".join(b"\0" + row.tobytes() for row in rows)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 5, 4, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + between
        + chunk(b"IDAT", zlib.compress(pixels))
        + chunk(b"IEND", b"")
    )


PROFILE = chunk(b"iCCP", HOSTILE + b"\0\0" + zlib.compress(bytes(4) + bytes(range(256)) * 16))


def test_the_pixels_are_the_same() -> None:
    plain = decode(png())
    assert (decode(png(PROFILE)) == plain).all()
    assert (decode(png(PROFILE + chunk(b"tEXt", b"a\0iCCP") + PROFILE)) == plain).all()
    assert bytes(without_profile(memoryview(png(PROFILE)))) == png()


def test_other_files_are_as_they_were() -> None:
    for code in (png(), png(chunk(b"tEXt", b"a\0iCCP")), b"iCCP", b"", png(PROFILE)[8:]):
        assert bytes(without_profile(memoryview(code))) == code


@pytest.mark.parametrize("stated", [(1 << 32) - 1, 0x800012F3, (1 << 31) - 1, 200 << 20])
@pytest.mark.parametrize("kind", [b"IDAT", b"tEXt", b"iCCP"])
def test_a_chunk_takes_no_memory_by_what_it_states(kind: bytes, stated: int) -> None:
    code = png()
    at = code.index(b"IDAT") - 4
    tracked = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="states"):
        decode(code[:at] + struct.pack(">I", stated) + kind + code[at + 8 :])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - tracked < 50_000  # kB


def test_a_file_that_lacks_its_last_bytes_is_read_as_before() -> None:
    assert (decode(png()[:-12]) == decode(png())).all()


@pytest.mark.usefixtures("processes")
def test_nothing_of_a_profile_is_printed() -> None:
    """In a process of its own: libpng writes to the file descriptor.

    The plain decoder shows that it would.
    """
    code = f"""
import cv2, numpy as np, sys
from allstep.data.image.decode import decode
data = bytes.fromhex("{png(PROFILE).hex()}")
cv2.imdecode(np.frombuffer(data, np.uint8), 1) if sys.argv[1] == "plain" else decode(data)
"""
    found = {}
    for how in ("plain", "ours"):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found[how] = done.stderr
    assert HOSTILE in found["plain"]
    assert found["ours"] == b""


@given(st.binary(max_size=80), st.integers(0, 200))
def test_a_broken_file_keeps_all_but_whole_profiles(noise: bytes, at: int) -> None:
    code = png(PROFILE)
    mutated = code[:at] + noise + code[at + len(noise) :]
    stripped = bytes(without_profile(memoryview(mutated)))
    assert stripped == mutated or (len(stripped) < len(mutated) and b"iCCP" in mutated)
