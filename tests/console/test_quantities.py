"""Figures as people read them."""

import pytest

from allstep.console.quantities import about, milliseconds, nbytes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (0.012, "0.012 s"),
            (3.4, "3.4 s"),
            (75, "75 s"),
            (89, "89 s"),
            (150, "2 min"),
            (600, "10 min"),
            (3000, "50 min"),
        ),
        *((7500, "2 h 05 min"), (9000, "2 h 30 min"), (864_000, "10.0 days")),
    ],
)
def test_estimates(value: float, text: str) -> None:
    assert about(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (0, "0 bytes"),
            (999, "999 bytes"),
            (999.6, "1 kB"),
            (54_824, "54.8 kB"),
            (999_700, "1 MB"),
        ),
        *((1_234_567, "1.23 MB"), (999_499_999, "999 MB"), (1e9, "1 GB"), (1.2e12, "1,200 GB")),
    ],
)
def test_bytes_never_have_four_digits_of_a_small_unit(value: float, text: str) -> None:
    assert nbytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.000123, "0.123 ms"), (0.0123, "12.3 ms"), (1.2346, "1,235 ms")]
)
def test_milliseconds(value: float, text: str) -> None:
    assert milliseconds(value) == text
