"""`--sizes`, and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import ConfigError
from allstep.study.data.sizes import parse_sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1/8,1/4,1/2,1", [8000, 16000, 32000, 64000]),
        ("1/64,1/32,...,1", [1000, 2000, 4000, 8000, 16000, 32000, 64000]),
        ("1, 0.5 ,1/4,500,", [500, 16000, 32000, 64000]),
        ("500,1000,...,1", [500, 1000, 2000, 4000, 8000, 16000, 32000, 64000]),
        ("100,300,...,5000", [100, 300, 900, 2700, 5000]),
        ("0.1,0.2,0.4,0.7,0.7", [6400, 12800, 25600, 44800]),
    ],
)
def test_sizes(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text, 64000, 10) == sizes


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1/4,1/2,1", "--sizes: a curve needs at least 4 sizes, found 3 in '1/4,1/2,1'; add"),
        ("", "found 0 in ''"),
        ("500,500,500,500,500", "found 1 in"),
        ("1/8,1/4,1/2,3/2", "--sizes: expected a number from 2 to .*, found '3/2'"),
        ("1/8,1/4,1/2,all", "--sizes: expected a number from 2 to .*, found 'all'"),
        ("1/8,1/4,1/2,70000", "expected at most all 64000 training samples, found 70000"),
        ("5,1/4,1/2,1", "the smallest size has 5 of 64000 .* fewer than a batch of 10; give"),
        ("...,1/4,1/2,1", "expected two sizes before '...' and one after it"),
        ("1/4,1/2,...", "expected two sizes before '...' and one after it"),
        ("1/8,1/4,...,...,1", "expected two sizes before '...' and one after it"),
        ("1/2,1/4,...,1", "expected rising sizes around '...'"),
        ("500,501,...,1", "more than 100 sizes between those around '...'"),
    ],
)
def test_bad_sizes(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_sizes(text, 64000, 10)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="0123456789/.,- e", max_size=30))
def test_any_text_is_sizes_or_one_line(text: str) -> None:
    try:
        sizes = parse_sizes(text, 1000, 1)
    except ConfigError as error:
        complaint = str(error)
    else:
        assert sizes == sorted(set(sizes)) and sizes[0] >= 1 and sizes[-1] <= 1000
        return
    assert complaint.startswith("--sizes: ") and "\n" not in complaint
