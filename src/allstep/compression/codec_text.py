"""The text of a codec, as in `sync.compress=topk:1%`, and the codec that it names.

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
"""

import math
from collections.abc import Callable

import torch

from allstep.compression.blocks import Codec
from allstep.compression.cast import Cast
from allstep.compression.int8 import Int8
from allstep.compression.one_bit import OneBit
from allstep.compression.power_sgd import PowerSGD
from allstep.compression.top_k import TopK
from allstep.compression.two_bit import TwoBit
from allstep.errors import ConfigError, did_you_mean

NONE = "none"
_LARGEST_RANK = 1024


def codec_from(text: str, name: str = "compress") -> Codec | None:
    """Return the codec of a text such as "2bit:0.5"; None for "none".

    name: of the setting, for the error.
    """
    lower = text.strip().lower()
    kind, colon, argument = lower.partition(":")
    if kind == NONE and not colon:
        return None
    if kind not in CODECS:
        raise ConfigError(
            f"{name}={text}: unknown compression; {did_you_mean(kind, [NONE, *CODECS])}"
        )
    try:
        return CODECS[kind](kind, argument if colon else None)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: {error}") from None


def _cast(kind: str, argument: str | None) -> Codec:
    _refuse(kind, argument)
    return Cast(kind, torch.float16 if kind == "fp16" else torch.bfloat16)


def _int8(kind: str, argument: str | None) -> Codec:
    _refuse(kind, argument)
    return Int8()


def _two_bit(kind: str, argument: str | None) -> Codec:
    if argument is None:
        return TwoBit(kind, None)
    threshold = _number(
        argument, "2bit, or 2bit:t with MXNet's threshold t above 0, such as 2bit:0.5"
    )
    if threshold <= 0:
        raise ValueError(
            f"the threshold {threshold:g} is not above 0; gradients of its size are"
            " sent, so choose one near their largest values, such as 2bit:0.5"
        )
    return TwoBit(f"{kind}:{_digits(threshold)}", threshold)


def _one_bit(kind: str, argument: str | None) -> Codec:
    if argument is None:
        return OneBit(kind, None)
    threshold = _number(argument, "1bit, or 1bit:t with MXNet's threshold t, such as 1bit:0")
    return OneBit(f"{kind}:{_digits(threshold)}", threshold)


def _top_k(kind: str, argument: str | None) -> Codec:
    expected = "topk:P% with a percentage P above 0 and at most 100, such as topk:1%"
    if argument is None or not argument.endswith("%"):
        raise ValueError(f"expected {expected}")
    percent = _number(argument.removesuffix("%"), expected)
    if not 0 < percent <= 100:
        raise ValueError(f"expected {expected}")
    return TopK(f"{kind}:{_digits(percent)}%", percent / 100)


def _power_sgd(kind: str, argument: str | None) -> Codec:
    expected = f"powersgd:r with a rank r from 1 to {_LARGEST_RANK}, such as powersgd:4"
    rank = _number(argument, expected)
    if not (rank.is_integer() and 1 <= rank <= _LARGEST_RANK):
        raise ValueError(f"expected {expected}")
    return PowerSGD(f"{kind}:{int(rank)}", int(rank))


CODECS: dict[str, Callable[[str, str | None], Codec]] = {
    "fp16": _cast,
    "bf16": _cast,
    "int8": _int8,
    "2bit": _two_bit,
    "1bit": _one_bit,
    "topk": _top_k,
    "powersgd": _power_sgd,
}
"""What makes a codec from its name and the text after the colon."""


def _refuse(kind: str, argument: str | None) -> None:
    if argument is not None:
        raise ValueError(f"{kind} takes no number; write {kind}")


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
