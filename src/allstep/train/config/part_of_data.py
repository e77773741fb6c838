"""A part of the training samples, as `data.use` and `--sizes` give it: a count or a fraction.

    1/64, 0.25, 1     a fraction of the samples, above 0; 1 is all of them
    2, 500, 60000     a count

A number up to 1 is a fraction, since nothing can be learned from one sample. Fractions are exact
(0.1 is a tenth), so that their counts do not depend on floating-point rounding.
"""

import re
from fractions import Fraction

MOST = 10**12
"""Largest count; the data limits it further."""
EXPECTED = f"a number from 2 to {MOST:,} of training samples, or a fraction such as 0.25 or 1/64"
"""What a part may be, for messages."""

_TEXT = re.compile(r"\d{1,18}(?:\s*/\s*\d{1,18}|\.\d{1,18})?")


def parse_part(value: object) -> int | Fraction:
    """Return a count (an int) or a fraction; raise ValueError for any other value."""
    part = _number(value)
    if not (0 < part <= 1 or (part.denominator == 1 and 2 <= part <= MOST)):
        raise ValueError(f"expected {EXPECTED}, found {value!r}")
    return part if part <= 1 else int(part)


def _number(value: object) -> Fraction:
    """Return the exact value of a number, or of a text such as "1/64"; 0 for anything else."""
    if isinstance(value, str) and _TEXT.fullmatch(value.strip()):
        above, _, below = value.partition("/")
        divisor = int(below or 1)
        return Fraction(above) / divisor if divisor else Fraction(0)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST:
        return Fraction(repr(value))
    return Fraction(0)


def num_in_part(part: int | Fraction, n: int) -> int:
    """Return how many of `n` samples the part has: a fraction is rounded down.

    The result may be 0, or larger than `n`, which the caller reports.
    """
    return part if isinstance(part, int) else n * part.numerator // part.denominator
