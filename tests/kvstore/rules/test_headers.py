"""Headers of messages: what is sent is read again, and anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.kvstore.rules.headers import (
    LENGTH,
    MAX_PAYLOAD,
    BadHeader,
    Header,
    Kind,
    read_header,
)

NUMBERS = st.integers(-(2**63), 2**63 - 1)
HEADERS = st.builds(
    Header,
    st.sampled_from(Kind),
    st.integers(0, 2**40),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.integers(0, 1),
    st.integers(0, MAX_PAYLOAD),
)


@given(HEADERS)
def test_a_header_is_read_as_it_was_sent(header: Header) -> None:
    assert len(header.numbers()) == LENGTH
    assert read_header(header.numbers()) == header


@given(st.lists(NUMBERS, min_size=LENGTH, max_size=LENGTH))
def test_foreign_numbers_are_no_header(numbers: list[int]) -> None:
    with pytest.raises(BadHeader, match="expected a header that begins with"):
        read_header(numbers)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [(1, 99, "unknown kind of message 99"), (7, -1, "-1 bytes"), (2, -1, "part -1")],
)
def test_bad_numbers(place: int, value: int, text: str) -> None:
    numbers = Header(Kind.PULL).numbers()
    numbers[place] = value
    with pytest.raises(BadHeader, match=text):
        read_header(numbers)
