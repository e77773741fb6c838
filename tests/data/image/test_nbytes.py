"""How many bytes an image may have, wherever it is stored."""

import pytest

from allstep.data.image import decode, limit
from allstep.data.sources.checksum import crc32c, crc32c_on


def test_more_than_the_limit_is_refused_before_anything_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert limit.MAX_NBYTES == 1 << 30
    monkeypatch.setattr(decode, "MAX_NBYTES", 1000)
    with pytest.raises(ValueError, match=r"^too large: 1001 bytes, expected at most 1000$"):
        decode.decode(bytes(1001))
    with pytest.raises(ValueError, match=r"^not an image"):
        decode.decode(bytes(1000))


@pytest.mark.parametrize("parts", [[], [b""], [b"abc"], [b"a", b"", b"bc" * 1000]])
def test_the_checksum_of_parts_is_that_of_the_whole(parts: list[bytes]) -> None:
    crc = 0
    for part in parts:
        crc = crc32c_on(crc, memoryview(part))
    assert crc == crc32c(b"".join(parts))
