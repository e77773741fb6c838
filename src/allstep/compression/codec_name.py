"""The text of a codec, as in `sync.compress=topk:1%`, checked and taken apart.

==============  =================================================  =====================
text            what is sent                                       bytes of 4 (float32)
==============  =================================================  =====================
none            values unchanged
fp16, bf16      half precision                                     2
int8            8 bits for each value, a scale for each block      1
2bit            a scale for each block, its negative, or 0         1/4
2bit:0.5        MXNet's: the threshold, its negative, or 0         1/4
1bit            the sign, a scale for each block                   1/8
1bit:0          MXNet's: 1 above the threshold, else -1            1/8
topk:1%         the largest values, with their places              0.06 at 1%
powersgd:4      a matrix of that rank                              depends on the size
==============  =================================================  =====================

This module needs no torch: the launching process checks a config before it loads torch.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from allstep.errors import ConfigError, did_you_mean

NONE = "none"
_LARGEST_RANK = 1024


class CodecName(NamedTuple):
    """What a text such as "topk:1%" states."""

    kind: str
    """The part before the colon."""
    number: float | None
    """The number after the colon, a percentage as a fraction; None without one."""
    text: str
    """The text in its usual form, from which another process makes the same codec."""


def codec_name(text: str, name: str = "compress") -> CodecName | None:
    """Return what the text of a codec states; None for "none".

    name: of the setting, for the error.
    """
    kind, colon, argument = text.strip().lower().partition(":")
    if kind == NONE and not colon:
        return None
    if kind not in KINDS:
        raise ConfigError(
            f"{name}={text}: unknown compression; {did_you_mean(kind, [NONE, *KINDS])}"
        )
    try:
        return KINDS[kind](kind, argument if colon else None)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: {error}") from None


def _plain(kind: str, argument: str | None) -> CodecName:
    if argument is not None:
        raise ValueError(f"{kind} takes no number; write {kind}")
    return CodecName(kind, None, kind)


def _two_bit(kind: str, argument: str | None) -> CodecName:
    if argument is None:
        return CodecName(kind, None, kind)
    threshold = _number(
        argument, "2bit, or 2bit:t with MXNet's threshold t above 0, such as 2bit:0.5"
    )
    if threshold <= 0:
        raise ValueError(
            f"the threshold {threshold:g} is not above 0; gradients of its size are"
            " sent, so choose one near their largest values, such as 2bit:0.5"
        )
    return CodecName(kind, threshold, f"{kind}:{_digits(threshold)}")


def _one_bit(kind: str, argument: str | None) -> CodecName:
    if argument is None:
        return CodecName(kind, None, kind)
    threshold = _number(argument, "1bit, or 1bit:t with MXNet's threshold t, such as 1bit:0")
    return CodecName(kind, threshold, f"{kind}:{_digits(threshold)}")


def _top_k(kind: str, argument: str | None) -> CodecName:
    expected = "topk:P% with a percentage P above 0 and at most 100, such as topk:1%"
    if argument is None or not argument.endswith("%"):
        raise ValueError(f"expected {expected}")
    percent = _number(argument.removesuffix("%"), expected)
    if not 0 < percent <= 100:
        raise ValueError(f"expected {expected}")
    return CodecName(kind, percent / 100, f"{kind}:{_digits(percent)}%")


def _power_sgd(kind: str, argument: str | None) -> CodecName:
    expected = f"powersgd:r with a rank r from 1 to {_LARGEST_RANK}, such as powersgd:4"
    rank = _number(argument, expected)
    if not (rank.is_integer() and 1 <= rank <= _LARGEST_RANK):
        raise ValueError(f"expected {expected}")
    return CodecName(kind, rank, f"{kind}:{int(rank)}")


KINDS: dict[str, Callable[[str, str | None], CodecName]] = {
    "fp16": _plain,
    "bf16": _plain,
    "int8": _plain,
    "2bit": _two_bit,
    "1bit": _one_bit,
    "topk": _top_k,
    "powersgd": _power_sgd,
}
"""What checks the text after the colon, by the name before it."""


def _digits(number: float) -> str:
    """Return a number as short text that another process reads as the same number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _number(argument: str | None, expected: str) -> float:
    try:
        number = float(argument or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"expected {expected}")
    return number
